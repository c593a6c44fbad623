# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A running Megatron model streams the bits that an export of its checkpoint has, over any tensor,
pipeline and expert parallelism; tests/hf/test_one_stream.py has what it takes of memory.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_asynchzp import save_hf, stream_weights
from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.mapping import jobs_in_order_of_use
from megatron_asynchzp.hf.shape import ModelShape
from scripts.testbed import megatron_runs
from scripts.testbed.megatron_flags import BF16, UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import run_ranks

pytestmark = pytest.mark.slow

WORLD_SIZE = 4
_MAX_FILE_NBYTES = 60_000  # several files

# fmt: off
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size",
          "96", "--position-embedding-type", "rope"]
# fmt: on
_GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
_QWEN2 = [*_LLAMA, *_GROUPED, "--add-qkv-bias"]
_EXPERTS = [*_LLAMA, "--num-experts", "4", "--moe-router-topk", "2"]
_TP = ["--tensor-model-parallel-size", "2"]
_EXPERTS_TP = [*_TP, "--sequence-parallel"]
_PP = ["--pipeline-model-parallel-size", "2"]
_EP = ["--expert-model-parallel-size", "2"]
_INTERLEAVED = [*_PP, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
_TRAIN = ["--train-iters", "2", "--lr", "3e-2", "--min-lr", "1e-2", "--lr-warmup-iters", "0"]
_VOCABULARY = ["--vocab-size", "101", "--make-vocab-size-divisible-by", "16"]


@dataclass(frozen=True)
class Case:
    """A model, how four ranks train it, and what is asked of the stream.

    frozen: part of the names of parameters that are not trained.
    """

    flags: tuple[str, ...]
    sizes: tuple[int, int, int]
    receivers: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    frozen: str = ""

    @property
    def wanted(self) -> tuple[int, ...]:
        return tuple(range(WORLD_SIZE)) if self.receivers is None else self.receivers

    @property
    def itemsize(self) -> int:
        return 2 if "--bf16" in self.flags or self.dtype is torch.bfloat16 else 4


# fmt: off
CASES: dict[str, Case] = {
    "llama, grouped, untied, data parallel": Case(
        (*_LLAMA, *_GROUPED, *UNTIED, *BF16), (2, 2, 4)),
    "llama, tied, data parallel, to ranks 0 and 1": Case(
        (*_LLAMA, *BF16), (2, 1, 4), receivers=(0, 1)),
    "llama, grouped, untied, TP 2": Case(
        (*_LLAMA, *_GROUPED, *UNTIED, *_TP, *BF16), (2, 1, 2)),
    "llama, untied, PP 2, attention is frozen": Case(
        (*_LLAMA, *UNTIED, *_PP, *BF16), (2, 1, 2), frozen="self_attention"),
    "llama, tied, PP 2": Case((*_LLAMA, *_PP), (1, 2, 2)),
    "llama, untied, PP 2 interleaved": Case(
        (*_LLAMA, *UNTIED, *_INTERLEAVED, *BF16), (2, 2, 2)),
    "llama, tied, PP 2 interleaved, to rank 1": Case(
        (*_LLAMA, *_INTERLEAVED), (1, 1, 2), receivers=(1,)),
    "llama, tied, TP 2, PP 2": Case((*_LLAMA, *_TP, *_PP, *BF16), (1, 1, 1)),
    "qwen2, tied, TP 2, PP 2 interleaved, to ranks 0 and 3": Case(
        (*_QWEN2, *_TP, *_INTERLEAVED), (1, 1, 1), receivers=(0, 3)),
    "qwen2, untied, PP 2, as bf16": Case(
        (*_QWEN2, *UNTIED, *_PP), (2, 1, 2), dtype=torch.bfloat16),
    "mixtral, untied, EP 2": Case((*_EXPERTS, *UNTIED, *_EP, *BF16), (2, 2, 4)),
    "mixtral, tied, EP 2, PP 2, to rank 2": Case(
        (*_EXPERTS, *_EP, *_PP), (1, 2, 2), receivers=(2,)),
    "qwen3_moe, untied, TP 2, EP 2": Case(
        (*_EXPERTS, *_GROUPED, *UNTIED, *_EXPERTS_TP, *_EP, "--expert-tensor-parallel-size", "1",
         "--qk-layernorm", "--moe-ffn-hidden-size", "48", *BF16), (2, 1, 2)),
    "mixtral, tied, TP 2 of the experts too": Case(
        (*_EXPERTS, *_EXPERTS_TP, *BF16), (1, 2, 2)),
    "gpt2, tied, TP 2": Case((*_TP, *BF16), (2, 2, 2)),
    "gpt2, untied, PP 2": Case((*UNTIED, *_PP), (2, 1, 2)),
}
# fmt: on


@dataclass
class Counted:
    """Of one stream on one rank.

    tensors: name and digest of each, as they came.
    received_nbytes: that other ranks sent; own_numel: elements of the parameters on this rank,
        whole, without copies of what another rank has too.
    """

    tensors: list[tuple[str, Any]] = field(default_factory=list)
    received_nbytes: int = 0
    own_numel: int = 0


def train_stream_and_save(cases: dict[str, Case], folder: Path) -> dict[str, Counted]:
    """Body of a rank."""
    return {name: _stream_and_save(case, folder / name) for name, case in cases.items()}


def _stream_and_save(case: Case, folder: Path) -> Counted:
    save = ["--save", str(folder), "--save-interval", "1000", "--ckpt-format", "torch_dist"]
    argv = gpt_args(*_VOCABULARY, *case.flags, *_TRAIN, *size_flags(case.sizes), *save)

    def inspect(model: list, _: Any) -> Counted:
        counted = counted_stream(model, case)
        saved = folder.with_name(f"{folder.name} saved")
        save_hf(model, saved, dtype=case.dtype, max_file_nbytes=_MAX_FILE_NBYTES)
        return counted

    with frozen(case.frozen):
        return run_pretrain(argv, inspect).inspected


@contextmanager
def frozen(part: str) -> Iterator[None]:
    """Inside, parameters with this part in their names are not trained; none without a part."""
    seed_parameters = megatron_runs.seed_parameters

    def seed_and_freeze(model: list) -> list:
        for chunk in model:
            for name, param in chunk.named_parameters():
                param.requires_grad_(not part or part not in name)
        return seed_parameters(model)

    with mock.patch.object(megatron_runs, "seed_parameters", seed_and_freeze):
        yield


def counted_stream(model: list, case: Case) -> Counted:
    from megatron.core import parallel_state

    from megatron_asynchzp.mcore.step.differences import is_counted_once

    groups: Any = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    params = [param for chunk in model for param in chunk.parameters()]
    counted = Counted(own_numel=sum(p.numel() for p in params if is_counted_once(p, *groups)))
    with counting(counted):
        for name, tensor in stream_weights(model, receivers=case.receivers, dtype=case.dtype):
            counted.tensors.append((name, digest(tensor)))
    return counted


@contextmanager
def counting(counted: Counted) -> Iterator[None]:
    """Inside, what is received is counted."""
    operation = dist.P2POp

    def note_operation(op: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        assert peer != dist.get_rank()
        if op is dist.irecv:
            counted.received_nbytes += tensor.nbytes
        return operation(op, tensor, peer)

    with mock.patch.object(dist, "P2POp", note_operation):
        yield


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Equal for tensors of the same dtype, shape and bits."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha1(bits).hexdigest()


# ---- what is compared


@dataclass
class Found:
    """The ranks' streams of a case, the export of the checkpoint of the same step, and what was
    saved without one."""

    case: Case
    ranks: list[Counted]
    shape: ModelShape
    exported: Path
    saved: Path

    @property
    def numel(self) -> int:
        """Elements of the model as Megatron has it, padding included."""
        jobs = jobs_in_order_of_use(self.shape)
        return sum(prod(job.rule.megatron_size(self.shape)) for job in jobs)


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("streams")
    items = [item for item in request.session.items if item.module is request.module]
    wanted = [item.callspec.params["name"] for item in items if "found" in item.fixturenames]
    cases = {name: CASES[name] for name in dict.fromkeys(wanted)}
    ranks = run_ranks(train_stream_and_save, WORLD_SIZE, cases, folder, timeout_s=270)
    results = {}
    for name, case in cases.items():
        output = folder / f"{name} exported"
        options: Any = {"dtype": case.dtype, "max_file_nbytes": _MAX_FILE_NBYTES}
        shape = export_model(folder / name, output, **options)
        saved = folder / f"{name} saved"
        results[name] = Found(case, [rank[name] for rank in ranks], shape, output, saved)
    return results


@pytest.mark.parametrize("name", CASES)
def test_receivers_get_the_bits_of_an_export_once_and_in_order_and_others_nothing(name, found):
    it = found[name]
    assert name.startswith(it.shape.family)
    files = it.exported.glob("*.safetensors")
    exported = {key: digest(one) for file in files for key, one in load_file(file).items()}
    in_order = [key for job in jobs_in_order_of_use(it.shape) for key in job.names]
    for rank, counted in enumerate(it.ranks):
        if rank in it.case.wanted:
            assert dict(counted.tensors) == exported
            assert [key for key, _ in counted.tensors] == in_order
        else:
            assert counted.tensors == []


@pytest.mark.parametrize("name", CASES)
def test_each_byte_is_sent_once_to_each_receiver_that_lacks_it(name, found):
    it = found[name]
    for rank, counted in enumerate(it.ranks):
        lacking = it.numel - counted.own_numel if rank in it.case.wanted else 0
        assert counted.received_nbytes == lacking * it.case.itemsize


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_saved_in_the_very_files_of_an_export(name, found):
    exported, saved = found[name].exported, found[name].saved
    assert sorted(file.name for file in saved.iterdir()) == sorted(
        file.name for file in exported.iterdir()
    )
    for file in exported.iterdir():
        assert (saved / file.name).read_bytes() == file.read_bytes(), file.name
