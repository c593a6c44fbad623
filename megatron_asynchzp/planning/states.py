# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes of one pretended pipeline stage: AsyncHZP's from real units on the meta device,
stock Megatron's by formula; activations by the planner's formulas.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.planning.pretended_world import Stage
from megatron_asynchzp.planning.savings import Saving, savings
from megatron_asynchzp.mcore.flags.asynchzp import resolve_grad_dtype, resolve_schedule
from megatron_asynchzp.mcore.planned import costing_of, moments_nbytes, naming_the_flag
from megatron_asynchzp.mcore.start_table import format_start_table
from megatron_asynchzp.mcore.state_bytes import matrix_numel, state_nbytes_by_formula
from megatron_asynchzp.mcore.units import plan_megatron_units, sharding_group_key
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.memory import Copies, Memory, stage_activations
from megatron_asynchzp.planner.model import Unit
from megatron_asynchzp.sharding.in_flight import MemoryInFlight
from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.sharding.pieces import grad_pieces
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
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


@dataclass(frozen=True)
class _Numel:
    """Of a rank of a stage: parameters by sharding group, those of them that Muon takes for
    matrices, and parameters of the whole stage."""

    of_rank: dict[str, int]
    matrices: dict[str, int]
    of_stage: int


def stage_states(stage: Stage, args: Namespace, ranks_per_node: int) -> StageStates:
    """Of the first rank of `stage`, whose padding is the least."""
    costing = costing_of(args)
    planned = _planned_numel(costing.units[stage.index], args)
    numel = _numel(stage.chunks, args) if stage.chunks else planned
    common: _Counts = (stage.index, stage.num_ranks, numel.of_rank, planned.of_rank, numel.of_stage)
    if not getattr(args, "use_asynchzp", False):
        formula = _baseline_nbytes(numel, stage, args)
        activations = stage_activations(costing.setting, stage.index)
        return StageStates(*common, formula, Memory(formula, {}, 0.0, activations))
    with naming_the_flag():
        if stage.chunks:
            found = _asynchzp_states(stage, args, costing, ranks_per_node, common)
        else:
            formula = costing.states_by_formula(stage.index)
            found = StageStates(*common, formula, costing.stage_memory(stage.index))
    return found if stage.index else replace(found, savings=savings(costing))


def _numel(chunks: Sequence[torch.nn.Module], args: Namespace) -> _Numel:
    numel, matrices, whole = {"dense": 0, "expert": 0}, {"dense": 0, "expert": 0}, 0
    for param in (param for chunk in chunks for param in chunk.parameters()):
        key = sharding_group_key(param)
        numel[key] += param.numel()
        matrices[key] += matrix_numel([param])
        whole += param.numel() * _num_parts(param, key, args)
    return _Numel(numel, matrices, whole)


def _planned_numel(units: Sequence[Unit], args: Namespace) -> _Numel:
    """By the planner's formulas. Of the stage as if tensor parallelism divided every parameter:
    norms are not worth more."""
    numel, matrices = {"dense": 0, "expert": 0}, {"dense": 0, "expert": 0}
    for unit in units:
        numel[unit.group] += unit.numel
        matrices[unit.group] += unit.matrix_numel
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    whole = numel["dense"] * args.tensor_model_parallel_size + numel["expert"] * experts
    return _Numel(numel, matrices, whole)


def _num_parts(param: torch.nn.Parameter, key: str, args: Namespace) -> int:
    """How many ranks of a stage hold different parts of a tensor (or different experts) each."""
    is_split = getattr(param, "tensor_model_parallel", False)
    if key == "dense":
        return args.tensor_model_parallel_size if is_split else 1
    tensor = args.expert_tensor_parallel_size if is_split else 1
    return tensor * args.expert_model_parallel_size


def _baseline_nbytes(numel: _Numel, stage: Stage, args: Namespace) -> dict[str, float]:
    """Stock Megatron's DDP: parameters and gradients whole, in buffers whose padding is left out;
    the optimizer's states over the data-parallel ranks with the distributed optimizer. Gradients
    have the model's dtype where they are not added up in fp32."""
    shards = {"dense": stage.groups.dp_cp.size(), "expert": stage.groups.expt_dp.size()}
    if not args.use_distributed_optimizer:
        shards = dict.fromkeys(shards, 1)
    model = 2 if args.bf16 or args.fp16 else FP32_NBYTES
    grad = FP32_NBYTES if args.accumulate_allreduce_grads_in_fp32 else model
    moments, whole = moments_nbytes(args), sum(numel.of_rank.values())
    main, of_moments = 0.0, 0.0
    for key, count in numel.of_rank.items():
        if count:
            main += args.main_params_dtype.itemsize * count / shards[key]
            of_moments += moments.mean(count, numel.matrices[key]) * count / shards[key]
    return {
        "model_param": float(model * whole),
        "main_grad": float(grad * whole),
        "main_param": main if model != FP32_NBYTES else 0.0,
        "optimizer_moments": of_moments,
    }


# --- AsyncHZP ----------------------------------------------------------------------------------


def shard_groups(
    group: dist.ProcessGroup, sizes: ShardSizes, grad_dtype: torch.dtype = torch.float32
) -> ShardGroups:
    """The groups of this rank alone: in a pretended world those of other ranks are not needed."""
    ranks = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), group.rank(), sizes)

    def new_group(_: str, axis_ranks: Sequence[int]) -> Any:
        return dist.new_group(list(axis_ranks))

    return ShardGroups.of_topology(topology, ranks, new_group, grad_dtype)


def _asynchzp_states(
    stage: Stage, args: Namespace, costing: Costing, ranks_per_node: int, common: _Counts
) -> StageStates:
    """The units, buffers and memory in flight of the run, and the table it will print. As in the
    planner, moments count with the padding, and are the mean of the ranks that share them."""
    sizes, schedule = costing.plan.sizes, resolve_schedule(args)
    plans = [plan_megatron_units(model, index) for index, model in enumerate(stage.chunks)]
    group_of = {"dense": stage.groups.dp_cp, "expert": stage.groups.expt_dp}
    groups = {
        key: shard_groups(
            group_of[key], sizes.restricted_to(group_of[key].size()), resolve_grad_dtype(args)
        )
        for key in dict.fromkeys(plan.group_key for chunk in plans for plan in chunk)
    }
    chunks = [
        {
            HZPUnit(
                plan.name, plan.params, groups[plan.group_key], layer=plan.layer
            ): plan.group_key
            for plan in chunk
        }
        for chunk in plans
    ]
    units = [unit for chunk in chunks for unit in chunk]
    flying = [memory_in_flight_of([*chunk], schedule) for chunk in chunks]
    moments = moments_nbytes(args)
    table = ""
    if stage.index == 0:  # rank 0's, as in a run
        table = format_start_table(_as_started(chunks, groups, flying), ranks_per_node, moments)
    memory = Memory.of_rank(
        state_nbytes_by_formula(units, moments, with_padding=True),
        flying,
        max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units),
        stage_activations(costing.setting, stage.index),
        schedule,
        _copies(units, schedule.grad_slot_nbytes) if costing.plan.is_on_cpu else None,
    )
    return StageStates(*common, state_nbytes_by_formula(units, moments), memory, table)


def _copies(units: Sequence[HZPUnit], slot_nbytes: int) -> Copies:
    trained = [unit for unit in units if unit.is_trained]
    pieces = (
        grad_pieces(unit.layout, unit.groups.topology.sizes.grad, slot_nbytes)[0].numel
        for unit in trained
        if not unit.reduces_in_place
    )
    added = (
        param.numel()
        for unit in trained
        if unit.reduces_in_place and unit.dtype != torch.float32
        for param in unit.params
    )
    return Copies(
        max(unit.in_flight(slot_nbytes).params for unit in units),
        FP32_NBYTES * max(pieces, default=0),
        FP32_NBYTES * max(added, default=0),
    )


def _as_started(
    chunks: Sequence[dict[HZPUnit, str]],
    groups: dict[str, ShardGroups],
    flying: Sequence[MemoryInFlight],
) -> list[Any]:
    """What the table of a start reads of model chunks."""
    return [
        SimpleNamespace(
            units=[*keys],
            groups=groups,
            runtime=SimpleNamespace(
                group_keys=keys,
                memory=memory,
                in_flight_nbytes=lambda memory=memory: memory.allocated,
            ),
        )
        for keys, memory in zip(chunks, flying, strict=True)
    ]
