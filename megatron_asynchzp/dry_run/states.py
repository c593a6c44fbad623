# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes of one pretended pipeline stage: AsyncHZP's from real units on the meta device,
stock Megatron's by formula; activations by the planner's formulas.
"""

from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.device import CpuDevice
from megatron_asynchzp.dry_run.pretended_world import Stage
from megatron_asynchzp.mcore.flags.asynchzp import resolve_grad_dtype, resolve_schedule
from megatron_asynchzp.mcore.planned_model import setting_of
from megatron_asynchzp.mcore.start_table import (
    format_start_table,
    moments_nbytes,
    state_nbytes_allocated,
    state_nbytes_by_formula,
)
from megatron_asynchzp.mcore.units import plan_megatron_units, sharding_group_key
from megatron_asynchzp.planner.memory import Memory, stage_activations
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.gathers import new_param_rings
from megatron_asynchzp.zero.plan import UnitPlan
from megatron_asynchzp.zero.reductions import new_grad_rings
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass(frozen=True)
class StageStates:
    """What one rank of a pipeline stage holds, in bytes.

    numel: of the rank's parameters before data parallelism, by sharding group ("dense",
    "expert"); whole_numel: of the stage, over its tensor and expert parallel ranks; formula: by
    state, without padding; memory: with padding, and all that comes beside the states.
    """

    index: int
    num_ranks: int
    numel: dict[str, int]
    whole_numel: int
    formula: dict[str, float]
    memory: Memory
    start_table: str = ""


def stage_states(stage: Stage, args: Namespace, ranks_per_node: int) -> StageStates:
    """Of the first rank of `stage`, whose padding is the least and whose moments are the most."""
    numel = {"dense": 0, "expert": 0}
    whole = 0
    for param in stage.model.parameters():
        key = sharding_group_key(param)
        numel[key] += param.numel()
        whole += param.numel() * _num_parts(param, key, args)
    common = (stage.index, stage.num_ranks, numel, whole)
    if getattr(args, "use_asynchzp", False):
        return _asynchzp_states(stage, args, ranks_per_node, common)
    formula = _baseline_nbytes(numel, stage, args)
    activations = stage_activations(setting_of(args), stage.index)
    return StageStates(*common, formula, Memory(formula, {}, 0.0, activations))


def _num_parts(param: torch.nn.Parameter, key: str, args: Namespace) -> int:
    """How many ranks of a stage hold different parts of a tensor (or different experts) each."""
    is_split = getattr(param, "tensor_model_parallel", False)
    if key == "dense":
        return args.tensor_model_parallel_size if is_split else 1
    tensor = args.expert_tensor_parallel_size if is_split else 1
    return tensor * args.expert_model_parallel_size


def _baseline_nbytes(numel: dict[str, int], stage: Stage, args: Namespace) -> dict[str, float]:
    """Stock Megatron's DDP: parameters and gradients whole, in buffers whose padding is left out;
    the optimizer's states over the data-parallel ranks with the distributed optimizer."""
    shards = {"dense": stage.groups.dp_cp.size(), "expert": stage.groups.expt_dp.size()}
    if not args.use_distributed_optimizer:
        shards = dict.fromkeys(shards, 1)
    model = 2 if args.bf16 or args.fp16 else 4
    grad = 2 if args.grad_reduce_in_bf16 else 4
    owned = sum(count / shards[key] for key, count in numel.items())
    return {
        "model_param": float(model * sum(numel.values())),
        "main_grad": float(grad * sum(numel.values())),
        "main_param": 4 * owned if model == 2 else 0.0,
        "optimizer_moments": moments_nbytes(args) * owned,
    }


# --- AsyncHZP ----------------------------------------------------------------------------------


def shard_sizes(args: Namespace) -> ShardSizes:
    """Of the dense group, as prepare_args resolved them."""
    return ShardSizes(
        args.asynchzp_param_shard_size,
        args.asynchzp_grad_shard_size,
        args.asynchzp_optim_shard_size,
    )


def shard_groups(
    group: dist.ProcessGroup, sizes: ShardSizes, grad_dtype: torch.dtype = torch.float32
) -> ShardGroups:
    """The groups of this rank alone: in a pretended world nobody has to create those of others."""
    ranks = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), group.rank(), sizes)
    return ShardGroups.of_topology(
        topology, ranks, lambda _, axis_ranks: dist.new_group(list(axis_ranks)), grad_dtype
    )


def _asynchzp_states(
    stage: Stage, args: Namespace, ranks_per_node: int, common: tuple
) -> StageStates:
    """The units, buffers and rings that the run will have, and the table it will print."""
    sizes, plans = shard_sizes(args), plan_megatron_units(stage.model)
    group_of = {"dense": stage.groups.dp_cp, "expert": stage.groups.expt_dp}
    groups = {
        key: shard_groups(
            group_of[key], sizes.restricted_to(group_of[key].size()), resolve_grad_dtype(args)
        )
        for key in dict.fromkeys(plan.group_key for plan in plans)
    }
    units = [HZPUnit(plan.name, plan.params, groups[plan.group_key]) for plan in plans]
    rings = _ring_nbytes(units, args)
    is_shown = stage.index == 0  # rank 0's, as in a run
    table = _start_table(units, plans, groups, rings, args, ranks_per_node) if is_shown else ""
    moments = moments_nbytes(args)
    whole = max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units)
    memory = Memory(
        state_nbytes_allocated(units, moments),
        rings,
        whole,
        stage_activations(setting_of(args), stage.index),
    )
    return StageStates(*common, state_nbytes_by_formula(units, moments), memory, table)


def _start_table(
    units: list[HZPUnit],
    plans: list[UnitPlan],
    groups: dict[str, ShardGroups],
    rings: dict[str, int],
    args: Namespace,
    ranks_per_node: int,
) -> str:
    keys = dict(zip(units, (plan.group_key for plan in plans), strict=True))
    runtime = SimpleNamespace(group_keys=keys, ring_nbytes=lambda: rings)
    chunk = SimpleNamespace(units=units, groups=groups, runtime=runtime)
    return format_start_table([chunk], ranks_per_node, moments_nbytes(args))


def _ring_nbytes(units: list[HZPUnit], args: Namespace) -> dict[str, int]:
    """As the run will have them: the units' device, meta, gives the slots no memory."""
    schedule = resolve_schedule(args)
    params = new_param_rings(units, schedule, CpuDevice())
    return {"param_ring": params.nbytes, "grad_ring": new_grad_rings(units, schedule).nbytes}
