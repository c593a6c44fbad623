# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""--optimizer-cpu-offload changes no bit of a Megatron run, of what it saves, or of a run that goes
on from there."""

from typing import Any

import pytest

from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, TENSOR_PARALLEL, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.mcore.test_parity import FP16_OVERFLOW
from tests.mcore.test_sleep import INTERLEAVED
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

OFFLOAD = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")
BF16_MOMENTS = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")
HYBRID = ("--overlap-cpu-optimizer-d2h-h2d", "--use-torch-optimizer-for-cpu-offload")
# fmt: off
LAYOUTS = {
    "data": (2, ("--bf16", *HYBRID, "--clip-grad", "0.5"), (1, 2, 2)),
    "moments": (2, ("--bf16", "--use-precision-aware-optimizer", *BF16_MOMENTS), (2, 2, 2)),
    "fp32": (2, ("--asynchzp-early-update", "off"), (1, 2, 2)),
    "overflow": (2, FP16_OVERFLOW, (2, 2, 2)),
    "sgd": (2, ("--bf16", "--optimizer", "sgd"), (1, 1, 1)),
    "tensor": (4, ("--bf16", *TENSOR_PARALLEL), (2, 2, 2)),
    "interleaved": (4, ("--bf16", *INTERLEAVED), (1, 2, 2)),
    "experts": (2, ("--bf16", *MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"), (1, 2, 2)),
}
# fmt: on


def held_of(chunks: Any, optimizer: Any) -> list[Any]:
    """All weights, main parameters and states of this rank."""
    units = [unit for chunk in chunks for unit in chunk.units]
    held = [one.storage for unit in units for one in (unit.model_param, unit.main_param)]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[param] for param in params]
    held += [state[key] for state in states for key in sorted(state) if key != "step"]
    return [one.tolist() for one in held]


def refuse_other_bytes(chunks: Any) -> None:
    """The start table and the planner count what is on the device, room for updates included."""
    from megatron.training import get_args

    from megatron_asynchzp.mcore.run.planned import costing_of
    from megatron_asynchzp.mcore.run.settings import Run
    from megatron_asynchzp.mcore.start.state_bytes import state_nbytes_allocated

    args: Any = get_args()
    units = [unit for chunk in chunks for unit in chunk.units]
    counted = state_nbytes_allocated(units, Run.current_settings().moment_nbytes)
    planned = costing_of(args).stage_memory(
        args.rank // (args.world_size // args.pipeline_model_parallel_size)
    )
    held = (
        sum(one.memory.numel() for one in chunks[0].runtime.host_states._places)
        if num_on_host(chunks)
        else 0
    )
    assert counted.get("update_room", 0) == pytest.approx(held, rel=0.01)
    for state in ("main_param", "update_room"):
        assert planned.at_rest.get(state, 0) == counted.get(state, 0), state


def num_on_host(chunks: Any) -> int:
    return sum(unit.is_on_host for chunk in chunks for unit in chunk.units)


def compare(argv: list[str], fractions: list[str]) -> list[tuple[int, Any]]:
    found = []
    for fraction in fractions:
        offload = [*OFFLOAD, fraction] if fraction else []
        nums: list[int] = []

        def look(chunks: Any, optimizer: Any, nums: list[int] = nums) -> Any:
            nums.append(num_on_host(chunks))
            for chunk in chunks:
                chunk.runtime.settle()
            refuse_other_bytes(chunks)
            return held_of(chunks, optimizer)

        run = run_pretrain([*argv, "--log-params-norm", *offload], inspect=look)
        found.append((nums[0], (run.losses_and_norms, run.params_norms, run.inspected)))
    return found


@pytest.mark.parametrize("name", [slow_unless(one == "data", one) for one in LAYOUTS])
def test_losses_norms_and_all_that_is_held_are_those_of_a_run_without_it(name: str):
    world_size, flags, sizes = LAYOUTS[name]
    argv = gpt_args("--train-iters", "4", *size_flags(sizes), *flags)
    for (none, expected), *found in on_ranks(compare, world_size, argv, ["", "0.5", "1.0"]):
        nums = [num for num, _ in found]
        assert none == 0 < nums[0] <= nums[1]
        assert [seen for _, seen in found] == [expected] * 2
