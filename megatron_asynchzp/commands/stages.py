# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a command line's groups, and the bytes of a rank of each pipeline stage."""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_asynchzp.commands import pretended_world
from megatron_asynchzp.commands.group_kinds import (
    Communicators,
    GroupKind,
    RankGroups,
    engine_communicators,
    group_kinds,
)
from megatron_asynchzp.commands.savings import Saving, savings
from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES
from megatron_asynchzp.mcore.flags.arguments import schedule_of
from megatron_asynchzp.mcore.flags.shard_sizes import held_sizes, sharding_group_size
from megatron_asynchzp.mcore.run.planned import costing_of, naming_the_flag
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.memory import Memory, stage_activations


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a rank of a pipeline stage."""

    index: int
    num_ranks: int
    numel: dict[str, int]  # Before data parallelism, by sharding group ("dense", "expert").
    formula: dict[str, float]  # By state, without padding.
    memory: Memory  # With padding, and all that comes in addition to the states.


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    args: Namespace  # Validated.
    lines: list[str]  # The changes of --use-asynchzp.
    ranks_per_node: int
    parameters: int  # Of the whole model.
    kinds: list[GroupKind]  # The groups of rank 0.
    stages: list[StageBytes]
    savings: list[Saving]  # On a rank of the first stage.
    communicators: Communicators

    @property
    def asked_budgets(self) -> dict[str, int]:
        schedule = schedule_of(self.args)
        return {"params": schedule.keep_params_nbytes, "grads": schedule.keep_grads_nbytes}

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def hccl_nbytes(self) -> int:
        asked = getattr(self.args, "pasa_vendor", None) == "npu-fusion"
        is_on_ascend = asked or importlib.util.find_spec("torch_npu") is not None
        if not is_on_ascend or self.args.distributed_backend == "gloo":
            return 0
        return self.communicators.hccl_nbytes

    def left_of(self, device_nbytes: float) -> float:
        """Return the bytes that the fullest rank leaves of a device, negative if none."""
        return self.fullest.memory.left_of(device_nbytes) - self.hccl_nbytes


def dry_run_of_flags(flags: tuple[str, ...], ranks: int, ranks_per_node: int) -> DryRun:
    return dry_run_of(*pretended_world.parse(list(flags), ranks, ranks_per_node), ranks_per_node)


def dry_run_of_script(script: Path, flags: list[str], ranks: int, ranks_per_node: int) -> DryRun:
    parsed = pretended_world.parse_script(script, flags, ranks, ranks_per_node)
    return dry_run_of(*parsed, ranks_per_node)


def dry_run_of(args: Namespace, lines: list[str], ranks_per_node: int) -> DryRun:
    costing = costing_of(args)
    with naming_the_flag():
        stages = [stage_bytes(costing, args, index) for index in range(costing.plan.parallel.pp)]
    run, ranks = RunSettings.of_arguments(args), RankGroups(args)
    sizes = run.sizes if args.use_asynchzp else None
    communicators = Communicators(0, 0)
    if sizes is not None:
        communicators = engine_communicators(ranks.sharding.values(), sizes, ranks_per_node)
    return DryRun(
        args,
        lines,
        ranks_per_node,
        costing.model.num_params,
        group_kinds(args, ranks, sizes),
        stages,
        savings(costing) if args.use_asynchzp else [],
        communicators,
    )


def stage_bytes(costing: Costing, args: Namespace, index: int) -> StageBytes:
    """Return the bytes of a rank of stage `index`, with --use-asynchzp or with stock Megatron."""
    numel = {"dense": 0, "expert": 0}
    for unit in costing.units[index]:
        numel[unit.group] += unit.numel
    if args.use_asynchzp:
        formula, memory = costing.states_by_formula(index), costing.stage_memory(index)
    else:
        # Gradients are fp32 if it sums in fp32.
        in_fp32 = args.accumulate_allreduce_grads_in_fp32
        grad = FP32_NBYTES if in_fp32 else costing.model.itemsize
        held = costing.with_sizes(held_sizes(args, sharding_group_size(args)))
        memory = plain_memory(held, index, grad, args.main_params_dtype.itemsize)
        formula = dict(memory.at_rest)
    return StageBytes(index, args.world_size // costing.plan.parallel.pp, numel, formula, memory)


def plain_memory(
    costing: Costing, index: int, grad: int | None = None, main: int = FP32_NBYTES
) -> Memory:
    """Return states and activations of a rank of pipeline stage `index`, without padding.

    grad, main: bytes of an element of gradients (None for the plan's) and of main parameters.
    """
    if grad is not None:
        costing = replace(costing, plan=replace(costing.plan, main_grad=grad))
    nbytes = costing.states_by_formula(index)
    nbytes["main_param"] *= main / FP32_NBYTES
    return Memory(nbytes, {}, 0.0, stage_activations(costing.setting, index))
