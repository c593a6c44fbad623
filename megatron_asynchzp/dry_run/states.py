# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes of one pretended pipeline stage: AsyncHZP's from real units on the meta device,
stock Megatron's by formula; activations by the planner's formulas.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.dry_run.pretended_world import Stage
from megatron_asynchzp.dry_run.savings import Saving, savings
from megatron_asynchzp.mcore.flags.asynchzp import resolve_grad_dtype, resolve_schedule
from megatron_asynchzp.mcore.planned_model import setting_of
from megatron_asynchzp.mcore.start_table import (
    format_start_table,
    moments_nbytes,
    state_nbytes_allocated,
    state_nbytes_by_formula,
)
from megatron_asynchzp.mcore.units import plan_megatron_units, sharding_group_key
from megatron_asynchzp.planner.activations import Setting
from megatron_asynchzp.planner.memory import Memory, kept, largest_unit, stage_activations, states
from megatron_asynchzp.planner.model import GroupKey, Unit, stage_units
from megatron_asynchzp.sharding.in_flight import MemoryInFlight, UnitInFlight, memory_in_flight
from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.sharding.pieces import grad_pieces
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.plan import UnitPlan
from megatron_asynchzp.zero.step import memory_in_flight_of
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass(frozen=True)
class StageStates:
    """What one rank of a pipeline stage holds, in bytes.

    numel: of the rank's parameters before data parallelism, by sharding group ("dense",
    "expert"); planned: the same by the planner's formulas; whole_numel: of the stage, over its
    tensor and expert parallel ranks; formula: by state, without padding; memory: with padding, and
    all that comes beside the states; savings: what memory budgets save, of the first stage.
    """

    index: int
    num_ranks: int
    numel: dict[str, int]
    planned: dict[str, int]
    whole_numel: int
    formula: dict[str, float]
    memory: Memory
    start_table: str = ""
    savings: Sequence[Saving] = ()


_Counts = tuple[int, int, dict[str, int], dict[str, int], int]
"""The first fields of StageStates, up to whole_numel."""


def stage_states(stage: Stage, args: Namespace, ranks_per_node: int) -> StageStates:
    """Of the first rank of `stage`, whose padding is the least and whose moments are the most."""
    setting = setting_of(args)
    planned_units = stage_units(setting.model, setting.parallel, setting.batch, stage.index)
    planned = {"dense": 0, "expert": 0}
    for unit in planned_units:
        planned[unit.group] += unit.numel
    if stage.model is None:
        numel, whole = planned, _planned_whole(planned, args)
    else:
        numel, whole = _numel(stage.model, args)
    common: _Counts = (stage.index, stage.num_ranks, numel, planned, whole)
    if not getattr(args, "use_asynchzp", False):
        formula = _baseline_nbytes(numel, stage, args)
        activations = stage_activations(setting, stage.index)
        return StageStates(*common, formula, Memory(formula, {}, 0.0, activations))
    if stage.model is None:
        formula, memory = _planned_memory(stage, args, setting, planned_units)
        found = StageStates(*common, formula, memory)
    else:
        found = _asynchzp_states(stage, stage.model, args, ranks_per_node, common)
    if stage.index:
        return found
    return replace(found, savings=savings(args, setting, shard_sizes(args)))


def _numel(model: torch.nn.Module, args: Namespace) -> tuple[dict[str, int], int]:
    """Parameters of the rank by sharding group, and of its stage."""
    numel, whole = {"dense": 0, "expert": 0}, 0
    for param in model.parameters():
        key = sharding_group_key(param)
        numel[key] += param.numel()
        whole += param.numel() * _num_parts(param, key, args)
    return numel, whole


def _planned_whole(planned: dict[str, int], args: Namespace) -> int:
    """Of a stage, as if tensor parallelism divided every parameter: norms are not worth more."""
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return planned["dense"] * args.tensor_model_parallel_size + planned["expert"] * experts


def _planned_memory(
    stage: Stage, args: Namespace, setting: Setting, units: Sequence[Unit]
) -> tuple[dict[str, float], Memory]:
    """By the planner's formulas alone, without padding."""
    topologies, schedule = topologies_of(stage, args), resolve_schedule(args)
    sizes: dict[GroupKey, ShardSizes] = {
        key: topology.sizes for key, topology in topologies.items()
    }
    itemsize = setting.model.itemsize
    formula = states(units, itemsize, sizes, moments_nbytes(args).most_params)
    needs = needs_of(units, itemsize, topologies, schedule.grad_slot_nbytes)
    flying = memory_in_flight(needs, schedule.depth, budget=schedule.in_flight_nbytes)
    memory = Memory(
        formula,
        flying.allocated | kept(schedule.keep_params_nbytes, schedule.keep_grads_nbytes),
        largest_unit(units, itemsize),
        stage_activations(setting, stage.index),
        own_grads=flying.own_grads,
    )
    return formula, memory


def topologies_of(stage: Stage, args: Namespace) -> dict[GroupKey, ShardTopology]:
    """Of the sharding groups of the stage's first rank."""
    groups: dict[GroupKey, dist.ProcessGroup] = {
        "dense": stage.groups.dp_cp,
        "expert": stage.groups.expt_dp,
    }
    of_dense = shard_sizes(args)
    return {
        key: ShardTopology(group.size(), group.rank(), of_dense.restricted_to(group.size()))
        for key, group in groups.items()
    }


def needs_of(
    units: Sequence[Unit],
    itemsize: int,
    topologies: Mapping[GroupKey, ShardTopology],
    slot_nbytes: int,
) -> list[UnitInFlight]:
    """Of each of `units` that has parameters, without padding."""
    return [
        UnitInFlight.of(
            unit.layer,
            unit.numel,
            itemsize,
            True,
            topologies[unit.group],
            slot_nbytes,
            part=unit.part,
        )
        for unit in units
        if unit.numel
    ]


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
        "optimizer_moments": moments_nbytes(args).most_params * owned,
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
    """The groups of this rank alone: in a pretended world those of other ranks are not needed."""
    ranks = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), group.rank(), sizes)

    def new_group(_: str, axis_ranks: Sequence[int]) -> Any:
        return dist.new_group(list(axis_ranks))

    return ShardGroups.of_topology(topology, ranks, new_group, grad_dtype)


def _plans_of(model: torch.nn.Module, args: Namespace) -> list[UnitPlan]:
    return plan_megatron_units(model, experts_per_unit=args.asynchzp_experts_per_unit)


def _asynchzp_states(
    stage: Stage, model: torch.nn.Module, args: Namespace, ranks_per_node: int, common: _Counts
) -> StageStates:
    """The units, buffers and memory in flight of the run, and the table it will print."""
    sizes, plans = shard_sizes(args), _plans_of(model, args)
    group_of = {"dense": stage.groups.dp_cp, "expert": stage.groups.expt_dp}
    groups = {
        key: shard_groups(
            group_of[key], sizes.restricted_to(group_of[key].size()), resolve_grad_dtype(args)
        )
        for key in dict.fromkeys(plan.group_key for plan in plans)
    }
    units = [
        HZPUnit(plan.name, plan.params, groups[plan.group_key], layer=plan.layer, part=plan.part)
        for plan in plans
    ]
    schedule = resolve_schedule(args)
    flying = memory_in_flight_of(units, schedule)
    is_shown = stage.index == 0  # rank 0's, as in a run
    table = _start_table(units, plans, groups, flying, args, ranks_per_node) if is_shown else ""
    moments = moments_nbytes(args)
    whole = max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units)
    is_cpu = args.distributed_backend == "gloo"
    needs = [unit.in_flight(schedule.grad_slot_nbytes) for unit in units]
    memory = Memory(
        state_nbytes_allocated(units, moments),
        flying.allocated | kept(schedule.keep_params_nbytes, schedule.keep_grads_nbytes),
        whole,
        stage_activations(setting_of(args), stage.index),
        copied_params=max(need.params for need in needs) if is_cpu else 0.0,
        copied_grads=_largest_piece(units, schedule.grad_slot_nbytes) if is_cpu else 0.0,
        own_grads=flying.own_grads + (_largest_cast(units) if is_cpu else 0.0),
        copies_beside=schedule.kind != "inline",
    )
    return StageStates(*common, state_nbytes_by_formula(units, moments), memory, table)


def _largest_piece(units: Sequence[HZPUnit], slot_nbytes: int) -> float:
    """Bytes of the gradients in fp32 that are reduced at once."""
    numels = (
        grad_pieces(unit.layout, unit.groups.topology.sizes.grad, slot_nbytes)[0].numel
        for unit in units
        if unit.is_trained and not unit.reduces_in_place
    )
    return FP32_NBYTES * max(numels, default=0)


def _largest_cast(units: Sequence[HZPUnit]) -> float:
    """Bytes that torch takes on a CPU to add a gradient of the model's dtype to one in fp32, where
    units add theirs as they come: the largest of them in fp32."""
    numels = (
        param.numel()
        for unit in units
        if unit.is_trained and unit.reduces_in_place and unit.dtype != torch.float32
        for param in unit.params
    )
    return FP32_NBYTES * max(numels, default=0)


def _start_table(
    units: list[HZPUnit],
    plans: list[UnitPlan],
    groups: dict[str, ShardGroups],
    memory: MemoryInFlight,
    args: Namespace,
    ranks_per_node: int,
) -> str:
    keys = dict(zip(units, (plan.group_key for plan in plans), strict=True))
    runtime = SimpleNamespace(
        group_keys=keys, memory=memory, in_flight_nbytes=lambda: memory.allocated
    )
    chunk: Any = SimpleNamespace(units=units, groups=groups, runtime=runtime)
    return format_start_table([chunk], ranks_per_node, moments_nbytes(args))
