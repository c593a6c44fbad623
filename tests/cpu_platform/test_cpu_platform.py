# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU platform: it comes and goes without a trace, and stock Megatron gives the same losses
behind it whatever its parallelism.
"""

import argparse
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import cpu_platform
from scripts.testbed import megatron_runs as runs
from scripts.testbed.megatron_flags import (
    BF16,
    DISTRIBUTED_OPTIMIZER,
    FP16,
    MEGATRON_FSDP,
    MEGATRON_HSDP,
    MIXTURE_OF_EXPERTS,
)
from tests.support.world import on_ranks

DEVICES = ["cuda", "cuda:0", torch.device("cuda"), 0]


@pytest.fixture
def platform():
    cpu_platform.install()
    yield
    cpu_platform.uninstall()


# --- comes and goes ----------------------------------------------------------------------------


def test_importing_the_platform_imports_no_megatron_and_replaces_nothing():
    ended = subprocess.run(
        [sys.executable, "-c", _IMPORT_ONLY], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["[]", "True", "False"]


_IMPORT_ONLY = """
import sys, torch
before = {name: id(value) for owner in (torch, torch.cuda) for name, value in vars(owner).items()}
from megatron_asynchzp import cpu_platform
after = {name: id(value) for owner in (torch, torch.cuda) for name, value in vars(owner).items()}
print([name for name in sys.modules if name.startswith("megatron.")])
print(all(after[name] == value for name, value in before.items()))
print(cpu_platform.is_installed())
"""


def test_uninstall_restores_every_attribute_by_identity():
    assert on_ranks(_attributes_changed_by_a_round_trip, 1) == [([], True)]


def test_install_and_uninstall_are_idempotent_and_what_was_replaced_is_listed(platform):
    assert cpu_platform.install() == []
    for _ in range(2):
        cpu_platform.uninstall()
        assert not cpu_platform.is_installed()
    replaced = cpu_platform.install()
    assert "torch.cuda.is_available" in replaced
    assert "megatron.core.parallel_state.get_nccl_options" in replaced


def test_models_on_the_meta_device_stay_there_with_the_platform_and_after_it():
    assert on_ranks(_devices_within_meta, 1) == [["meta", "meta"]]


def _devices_within_meta() -> list[str]:
    # torch makes its table of device constructors once: as in a process that has not made it yet.
    torch.utils._device._device_constructors.cache_clear()
    found = []
    cpu_platform.install()
    for _ in range(2):
        with torch.device("meta"):
            found.append(torch.empty(2).device.type)
        cpu_platform.uninstall()
    return found


def _snapshot() -> dict[tuple[str, str], Any]:
    """Every attribute of everything that the platform may touch (kept alive: ids stay unique)."""
    # fmt: off
    owners = {
        "torch": torch, "cuda": torch.cuda, "random": torch.cuda.random, "nvtx": torch.cuda.nvtx,
        "accelerator": torch.accelerator, "Tensor": torch.Tensor, "Module": torch.nn.Module,
        "dist": dist, "c10d": dist.distributed_c10d, "_C": torch._C,
        "DeviceContext": torch.utils._device.DeviceContext,
    }
    # fmt: on
    owners |= {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
    return {
        (owner_name, name): value
        for owner_name, owner in owners.items()
        for name, value in vars(owner).items()
    }


def _attributes_changed_by_a_round_trip() -> tuple[list, bool]:
    import megatron.training  # noqa: F401

    cpu_platform.uninstall()
    cpu_platform.install()  # whatever it imports is part of "before"
    cpu_platform.uninstall()
    before = _snapshot()
    cpu_platform.install()
    is_different = torch.cuda.is_available is not before["cuda", "is_available"]
    cpu_platform.uninstall()
    after = _snapshot()
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    return changed, is_different


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_tensor_asked_for_on_a_cuda_device_is_on_the_cpu(platform, device):
    made = [
        torch.zeros(2, device=device),
        torch.empty(2, device=device, pin_memory=True),
        torch.tensor([1.0], device=device),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device, torch.bfloat16),
        torch.ones(2).to(device=device),
        torch.ones(2).new_zeros(3, device=device),
        torch.ones(2).cuda(),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).cuda().weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_the_device_of_a_context_is_the_cpu_and_types_read_as_those_of_a_device(platform):
    assert torch.zeros(2, device="meta").device.type == "meta"
    with torch.device("cuda"):
        assert torch.zeros(2).device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.int64).dtype == torch.int64


def test_the_cuda_generator_is_the_cpu_generator(platform):
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


def test_tensor_parallel_ranks_have_their_own_seeds(platform):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    draws = []
    for tp_rank in range(2):
        model_parallel_cuda_manual_seed(1, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(4))
    assert not torch.equal(*draws)


def test_streams_and_events_order_nothing_and_complain_about_nothing(platform):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event.record()
    stream.wait_event(event)
    torch.ones(1).record_stream(stream)
    assert event.query() and event.elapsed_time(stream.record_event()) >= 0.0


def test_a_pre_multiplied_sum_scales_before_it_sums():
    for scattered, reduced, source in on_ranks(_pre_multiplied_sums, 2):
        assert scattered == reduced == [1.5]  # 0.5 * (1 + 2)
        assert source in ([1.0, 1.0], [2.0, 2.0])  # a reduce-scatter leaves its input alone


def _pre_multiplied_sums() -> tuple[list, list, list]:
    cpu_platform.install()
    source = torch.full((2,), 1.0 + dist.get_rank())
    op = dist._make_nccl_premul_sum(torch.tensor(0.5))
    scattered, reduced = torch.empty(1), source[:1].clone()
    dist.reduce_scatter_tensor(scattered, source, op=op)
    dist.all_reduce(reduced, op, async_op=True).wait()
    return scattered.tolist(), reduced.tolist(), source.tolist()


def test_tensors_that_differ_in_size_between_ranks_are_gathered_and_scattered():
    for gathered, gathered_meanwhile, scattered in on_ranks(_uneven_collectives, 3):
        assert gathered == gathered_meanwhile == [[0.0], [], [2.0, 2.0]]
        assert scattered in ([6.0], [], [6.0, 6.0])


def _uneven_collectives() -> tuple[list, list, list]:
    cpu_platform.install()
    rank, sizes = dist.get_rank(), (1, 0, 2)
    pieces, others = ([torch.empty(size) for size in sizes] for _ in range(2))
    dist.all_gather(pieces, torch.full((sizes[rank],), float(rank)))
    dist.all_gather(others, torch.full((sizes[rank],), float(rank)), async_op=True).wait()
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, [torch.full((size,), 1.0 + rank) for size in sizes])
    assert output.numel() == sizes[rank]
    gathered, gathered_meanwhile = ([one.tolist() for one in found] for found in (pieces, others))
    return gathered, gathered_meanwhile, output.tolist()


# --- arguments ---------------------------------------------------------------------------------


def test_cpu_defaults_list_each_change_and_change_nothing_twice():
    args = argparse.Namespace(distributed_backend="nccl", num_workers=2, masked_softmax_fusion=True)
    changes = cpu_platform.apply_cpu_defaults(args)
    assert "distributed_backend: 'nccl' -> 'gloo'" in changes and len(changes) == 3
    assert (args.distributed_backend, args.num_workers) == ("gloo", 0)
    assert cpu_platform.apply_cpu_defaults(args) == []


def test_kernels_and_layers_of_a_device_have_their_forms_on_the_cpu():
    args = argparse.Namespace(
        use_flash_attn=True,
        moe_token_dispatcher_type="flex",
        spec=["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        sequence_parallel=True,
    )
    cpu_platform.apply_cpu_defaults(args)
    assert (args.use_flash_attn, args.moe_token_dispatcher_type) == (False, "alltoall")
    assert args.spec[0] == "megatron_asynchzp.cpu_platform.local_hybrid" and args.sequence_parallel
    args = argparse.Namespace(spec=["mine", "spec"], moe_token_dispatcher_type="allgather")
    assert cpu_platform.apply_cpu_defaults(args) == []


@pytest.mark.parametrize("flag", ["fp8", "use_torch_fsdp2", "optimizer_cuda_graph"])
def test_what_a_cpu_cannot_do_is_refused_by_name(flag):
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}"):
        cpu_platform.apply_cpu_defaults(argparse.Namespace(**{flag: True}))


# --- stock Megatron ----------------------------------------------------------------------------

STEPS = 6
_TP, _PP, _EP = (
    [f"--{axis}-model-parallel-size", "2"] for axis in ("tensor", "pipeline", "expert")
)
CONFIGURATIONS = {
    "DDP": runs.gpt_args("--eval-iters", "1"),
    "DDP again": runs.gpt_args("--eval-iters", "1"),
    "distributed optimizer": runs.gpt_args(*DISTRIBUTED_OPTIMIZER),
    "TP=2": runs.gpt_args(*_TP),
    "PP=2": runs.gpt_args(*_PP, "--eval-iters", "1"),
    "ZeRO-3": runs.gpt_args(*MEGATRON_FSDP),
    "HSDP": runs.gpt_args(*MEGATRON_HSDP),
    "MoE": runs.gpt_args(*MIXTURE_OF_EXPERTS),
    "MoE EP=2": runs.gpt_args(*MIXTURE_OF_EXPERTS, *_EP),
    "DDP bf16": runs.gpt_args(*BF16),
    "ZeRO-3 bf16": runs.gpt_args(*MEGATRON_FSDP, *BF16),
    "DDP fp16": runs.gpt_args(*FP16),
    "distributed optimizer fp16": runs.gpt_args(*DISTRIBUTED_OPTIMIZER, *FP16),
}
# Against which one, and how far apart losses may be; gradient norms ten times as far.
ORACLES = {
    "DDP again": ("DDP", 0.0),
    "distributed optimizer": ("DDP", 2e-5),
    "TP=2": ("DDP", 2e-5),
    "PP=2": ("DDP", 2e-5),
    "HSDP": ("DDP", 2e-5),
    "MoE EP=2": ("MoE", 2e-5),
    "ZeRO-3": ("DDP", 2e-5),
    "ZeRO-3 bf16": ("DDP bf16", 2e-3),
    "distributed optimizer fp16": ("DDP fp16", 1e-4),
}


def _run_all(names: list[str]) -> dict[str, runs.RunRecord]:
    steps = ["--train-iters", str(STEPS)]
    needed = dict.fromkeys([*names, *(ORACLES[name][0] for name in names)])
    return {name: runs.run_pretrain([*CONFIGURATIONS[name], *steps]) for name in needed}


@pytest.mark.slow  # stock DDP, TP, PP and experts run beside ours in tests of mcore/
def test_stock_layouts_learn_and_agree_on_losses_and_gradient_norms():
    pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
    records, *others = on_ranks(_run_all, 4, list(ORACLES), timeout_s=400)
    for name, record in records.items():
        assert all(one[name].steps == record.steps for one in others), name
        assert len(record.steps) == STEPS
        assert record.losses[-1] < record.losses[0] - 0.2, name
    for name, (oracle, tolerance) in ORACLES.items():
        ours = records[name]
        assert ours.losses == pytest.approx(records[oracle].losses, rel=tolerance), name
        norms = pytest.approx(records[oracle].grad_norms, rel=10 * tolerance)
        assert ours.grad_norms == norms, name
        if ours.validation_loss is not None:
            validation = pytest.approx(records[oracle].validation_loss, rel=tolerance)
            assert ours.validation_loss == validation, name
