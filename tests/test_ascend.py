# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a start on Ascend needs beside torch_npu, with stand-ins for it: no NPU."""

import sys
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import launch
from megatron_asynchzp.attention import vendors
from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import choose_vendor
from megatron_asynchzp.commands.group_kinds import Communicators
from megatron_asynchzp.commands.memory_tables import GIB, verdict
from megatron_asynchzp.commands.stages import DryRun
from megatron_asynchzp.errors import ConfigurationError
from scripts.train import on_ascend

_STARTS = [1764110000.125, 1764109990.5, 1764110003.25]  # fp32 is 128 s apart here
ReduceOp = dist.ReduceOp


def _ranks_of(monkeypatch: pytest.MonkeyPatch, rows: list[torch.Tensor]) -> Any:
    """The mended all_reduce where the ranks hold `rows`, of a backend that refuses fp64."""

    def backend(tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> str:
        assert tensor.dtype != torch.float64
        return "the backend's"

    def gather(gathered: torch.Tensor, bits: torch.Tensor, group: Any) -> None:
        assert bits.dtype == gathered.dtype == torch.int64
        gathered.copy_(torch.cat([row.reshape(-1).view(torch.int64) for row in rows]))

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(rows))
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    return on_ascend.exact_doubles(backend, "cpu")


@pytest.mark.parametrize(
    "op, true",
    [
        (ReduceOp.MIN, min(_STARTS)),
        (ReduceOp.MAX, max(_STARTS)),
        (ReduceOp.SUM, sum(_STARTS)),
        (ReduceOp.AVG, sum(_STARTS) / 3),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_doubles_are_reduced_without_rounding_where_the_backend_has_none(
    monkeypatch, op, true, shape
):
    rows = [torch.full(shape, value, dtype=torch.float64) for value in _STARTS]
    tensor = rows[1].clone()
    _ranks_of(monkeypatch, rows)(tensor, op=op)
    assert torch.equal(tensor, torch.full(shape, true, dtype=torch.float64))


def test_other_dtypes_and_devices_reach_the_backend_and_what_is_not_reduced_is_refused(monkeypatch):
    reduce = _ranks_of(monkeypatch, [torch.zeros(1, dtype=torch.float64)])
    assert reduce(torch.zeros(1)) == reduce(torch.zeros(1), ReduceOp.MAX) == "the backend's"
    for options in ({"async_op": True}, {"op": ReduceOp.BXOR}):
        with pytest.raises(NotImplementedError, match="HCCL has no fp64"):
            reduce(torch.zeros(1, dtype=torch.float64), **options)


def test_types_read_as_on_cuda():
    read = on_ascend.type_as_on_cuda(lambda self, *args: args[0] if args else self)
    assert read("torch.npu.FloatTensor") == "torch.cuda.FloatTensor"
    assert read("torch.FloatTensor") == "torch.FloatTensor"


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '13.0'", 'cuda = "12.8"'])
def test_torchs_build_for_cuda_is_refused_with_the_remedy(tmp_path: Path, line: str):
    (tmp_path / "version.py").write_text(f"debug = False\n{line}\n")
    with pytest.raises(SystemExit, match=r"CUDA 1.*whl/cpu"):
        on_ascend.refuse_cuda_build(tmp_path)
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\nhip = None\n")
    on_ascend.refuse_cuda_build(tmp_path)


def _call(heads=2, dim=8, dtype=torch.bfloat16, sequences=0) -> AttentionCall:
    length = max(sequences, 4)
    ends = torch.arange(sequences + 1)
    packed = PackedSequences(ends, ends) if sequences else None
    x = torch.zeros(1, heads, length, dim, dtype=dtype)
    return AttentionCall(x, x, x, AttentionMask(length, length, packed=packed), 1.0)


@pytest.mark.parametrize(
    "most, beyond, words",
    [
        ({"dtype": torch.float32}, {"dtype": torch.float64}, "fp16, bf16 and fp32"),
        ({"heads": 256}, {"heads": 257}, "256 heads"),
        ({"dim": 768}, {"dim": 769}, "768 channels"),
        ({"sequences": 1024}, {"sequences": 1025}, "1024 packed sequences"),
    ],
)
def test_what_ascends_operator_cannot_do_is_refused_by_name(monkeypatch, most, beyond, words):
    monkeypatch.setattr(AttentionCall, "device", SimpleNamespace(type="npu"))
    monkeypatch.setattr(vendors.importlib.util, "find_spec", lambda name: True)
    assert choose_vendor(_call(**most)).name == "npu-fusion"
    assert choose_vendor(_call(**beyond)).name == "sdpa"
    with pytest.raises(ConfigurationError, match=words):
        choose_vendor(_call(**beyond), "npu-fusion")


@pytest.mark.parametrize("kind, chosen", [("npu", "npu:1"), ("cuda", "cuda:1"), ("mps", "cpu")])
def test_readmes_example_chooses_the_accelerator_that_is_there(kind, chosen):
    page = (Path(__file__).parents[1] / "README.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    start = example.index("device = torch.get_default_device()")
    indices: list[int] = []
    fake = SimpleNamespace(
        get_default_device=lambda: "cpu",
        device=lambda type, index: SimpleNamespace(index=index, name=f"{type}:{index}"),
        accelerator=SimpleNamespace(
            current_accelerator=lambda check_available=False: SimpleNamespace(type=kind),
            set_device_index=indices.append,
        ),
    )
    names = {"torch": fake, "dist": SimpleNamespace(get_node_local_rank=lambda: 1)}
    exec(example[start : example.index("torch.manual_seed")], names)
    assert getattr(names["device"], "name", names["device"]) == chosen
    assert indices == ([] if chosen == "cpu" else [1])


def test_hccls_buffers_count_in_the_need_of_a_rank_on_ascend_alone(monkeypatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    memory = SimpleNamespace(total=10 * GIB, left_of=lambda device: device - 10 * GIB)
    stages: Any = [SimpleNamespace(index=0, memory=memory)]

    def found(vendor: str, backend: str = "nccl") -> DryRun:
        args = Namespace(pasa_vendor=vendor, distributed_backend=backend)
        return DryRun(args, [], 8, 0, [], stages, [], Communicators(3, 2))

    ascend = found("npu-fusion")
    assert ascend.hccl_nbytes == 5 * 400 * 2**20
    assert verdict(ascend, 11 * GIB).startswith("does not fit") and ascend.left_of(11 * GIB) < 0
    assert "HCCL" in verdict(ascend, 64 * GIB) and "NCCL's rings" not in verdict(ascend, 64 * GIB)
    for other in (found("auto"), found("npu-fusion", "gloo")):
        assert other.hccl_nbytes == 0 and verdict(other, 11 * GIB).startswith("fits")
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    assert ascend.hccl_nbytes == 5 * 100 * 2**20


def test_the_start_script_installs_all_that_it_brings_before_the_script_runs(monkeypatch, tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text("")
    ran: list[list[str]] = []

    def run(path: Path, arguments: list[str]) -> None:
        assert on_ascend.os.environ["TORCH_NPU_DEVICE_CAPABILITY"] == "8.0"
        assert torch.Tensor.type is not read and hasattr(torch.Tensor.type, "__wrapped__")
        assert dist.all_reduce is not all_reduce and hasattr(dist.all_reduce, "__wrapped__")
        assert hasattr(torch.cuda.get_device_properties, "__wrapped__")
        ran.append(arguments)

    read, all_reduce = torch.Tensor.type, dist.all_reduce
    monkeypatch.setattr(torch.Tensor, "type", read)  # put back in the end
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", torch.cuda.get_device_properties)
    monkeypatch.setenv("TORCH_NPU_DEVICE_CAPABILITY", "")
    monkeypatch.delenv("TORCH_NPU_DEVICE_CAPABILITY")
    for name in ("torch_npu", "torch_npu.contrib", "torch_npu.contrib.transfer_to_npu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torch_npu"].__spec__ = ModuleSpec("torch_npu", None)
    monkeypatch.setattr(on_ascend, "refuse_cuda_build", lambda folder: None)
    monkeypatch.setattr(launch, "run_script", run)
    on_ascend.main([str(script), "--seed", "1"])
    assert ran == [["--seed", "1"]]
