# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The table in the log of a start: groups, units and bytes, by formula and as allocated."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import AxisGroup
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.early_units import preview_nbytes
from megatron_asynchzp.engine.sharding.topology import spans_nodes
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.low_precision import kept_nbytes
from megatron_asynchzp.mcore.start.state_bytes import (
    mean_moment_nbytes,
    state_nbytes_allocated,
    state_nbytes_by_formula,
)
from megatron_asynchzp.mcore.start.units import has_late_grads
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.planner.memory import MomentBytes

_MAX_RANKS_SHOWN = 8


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MAX_RANKS_SHOWN:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]} ({len(ranks)} ranks)"


def _format_nbytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def format_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Format columns below a title and names; no cell is cut or wrapped, so a search finds it."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join((title, *(f"  {line}" for line in lines)))


def _groups_table(
    groups: dict[str, ShardGroups], ranks_per_node: int, in_codes: Collection[str]
) -> str:
    rows = [("group", "operation", "when", "ranks", "link")]

    def add(key: str, operation: str, when: str, axes: Sequence[AxisGroup]) -> None:
        for axis in axes:
            ranks = dist.get_process_group_ranks(axis.group)
            link = "between nodes" if spans_nodes(ranks, ranks_per_node) else "in one node"
            rows.append((key, operation, when, _format_ranks(ranks), link))

    for key, group in groups.items():
        params = "parameters, FP8 and FP4 weights as codes" if key in in_codes else "parameters"
        add(key, f"gather {params}", "each unit, forward and backward", group.unshard)
        grads = "gradients in bf16" if group.grad_dtype == torch.bfloat16 else "gradients"
        add(key, f"reduce-scatter {grads}", "each unit, each micro-batch", group.grad_reduce)
        add(key, f"reduce-scatter {grads}", "once per step", group.grad_sync)
        add(key, f"all-reduce {grads}", "once per step (replicas)", group.replica_sync)
        add(key, "gather parameter shards", "once per step", group.param_sync)
    return format_table("AsyncHZP groups of rank 0", rows)


def _states_table(
    units: Sequence[HZPUnit],
    groups: dict[str, ShardGroups],
    moments: MomentBytes,
    beside: Sequence[tuple[str, float, int | None]],
) -> str:
    formula = state_nbytes_by_formula(units, moments)
    allocated = state_nbytes_allocated(units, moments)
    sizes = {key: group.topology.sizes for key, group in groups.items()}
    columns = {"model_param": "param", "main_grad": "grad"}
    rows = [("state", "shard size", "by formula", "allocated (padding included)")]
    for state in formula:
        shard = ", ".join(
            f"{getattr(size, columns.get(state, 'optim'))} ({key})" for key, size in sizes.items()
        )
        rows.append(
            (state, shard, _format_nbytes(formula[state]), _format_nbytes(allocated[state]))
        )
    by_formula, in_fact = (_format_nbytes(sum(of.values())) for of in (formula, allocated))
    rows.append(("all, at rest", "", by_formula, in_fact))
    for kind, counted_before, held in beside:
        counted = "" if held is None else _format_nbytes(held)
        rows.append((kind, "", _format_nbytes(counted_before), counted))
    return format_table("Bytes per rank", rows)


def _beside_states(
    chunks: Sequence[AsyncHZPDataParallel], whole_nbytes: int | None, moments: MomentBytes
) -> list[tuple[str, float, int | None]]:
    """List the memory in addition to the states: its name, bytes by formula and as allocated."""
    formula: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    for chunk in chunks:
        formula.update(chunk.runtime.memory.allocated)
        allocated.update(chunk.runtime.in_flight_nbytes())
    rows: list[tuple[str, float, int | None]] = []
    rows += [(f"in flight: {kind}", formula[kind], allocated[kind]) for kind in formula]
    rows.append(("in flight, together", formula.total(), allocated.total()))
    own_grads = max(chunk.runtime.memory.own_grads for chunk in chunks)
    rows.append(("autograd's own gradients, at most", own_grads, None))
    if copies := sum(kept_nbytes(chunk.module, chunk.config) for chunk in chunks):
        rows.append(("quantised copies of weights, at most", copies, None))
    units = [unit for chunk in chunks for unit in chunk.units]
    first = chunks[0]
    sizes = first.tp_group.size(), first.pp_group.size(), first.config.qk_layernorm
    if preview := preview_of_units(first.communication.schedule, units, moments, *sizes):
        rows.append(("preview of an update, at most", preview, None))
    if whole_nbytes is not None:
        largest = max(unit.layout.numel * unit.dtype.itemsize for unit in units)
        rows.append(("whole at most, while the model was built", largest, whole_nbytes))
    return rows


def preview_of_units(
    schedule: ScheduleConfig,
    units: Sequence[HZPUnit],
    moments: MomentBytes,
    tp: int,
    pp: int,
    has_qk_norms: bool,
) -> float:
    """Return the most bytes that previews of updates take; arguments as for has_late_grads."""
    if not schedule.may_send_early:
        return 0.0
    is_forced = schedule.early_update == "on"
    return max(
        (
            preview_nbytes(
                unit.optim_range.numel,
                mean_moment_nbytes(unit, moments),
                is_scaled=unit.dtype == torch.float16,
                shard_numel=unit.model_param.range.numel if unit.is_main_param_aliased else 0,
            )
            for unit in units
            if unit.is_trained
            and unit.outer_traffic.may_have_room(is_forced)
            and not has_late_grads(unit, tp, pp, has_qk_norms)
        ),
        default=0.0,
    )


def _units_table(units: Sequence[HZPUnit]) -> str:
    """List equal units in one row: a deep model has hundreds that differ in a number."""
    rows = [("unit", "how many", "parameters each", "gathered bytes each", "padding")]
    kinds: dict[tuple, list[str]] = {}
    for unit in units:
        key = (unit.layout.numel, unit.layout.padded_numel, unit.dtype, unit.is_trained)
        kinds.setdefault(key, []).append(unit.name)
    for (numel, padded, dtype, is_trained), names in kinds.items():
        name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        name += "" if is_trained else " (frozen)"
        gathered = _format_nbytes(padded * dtype.itemsize)
        padding = f"{(padded - numel) / padded:.1%}"
        rows.append((name, str(len(names)), f"{numel:,}", gathered, padding))
    return format_table("Units", rows)


def format_start_table(
    chunks: Sequence[AsyncHZPDataParallel], settings: RunSettings, built: Construction | None
) -> str:
    """Return the whole table as text, for the calling rank."""
    whole_nbytes = None if built is None else built.peak_whole_nbytes
    ranks_per_node, moments = settings.ranks_per_node, settings.moment_nbytes
    keys = {unit: chunk.runtime.group_keys[unit] for chunk in chunks for unit in chunk.units}
    in_codes = {key for unit, key in keys.items() if unit.code_gathers}
    groups = {key: group for key, group in chunks[0].groups.items() if key in keys.values()}
    units = list(keys)
    tables = (
        _groups_table(groups, ranks_per_node, in_codes),
        _states_table(units, groups, moments, _beside_states(chunks, whole_nbytes, moments)),
        _units_table(units),
    )
    return "\n".join(tables)


def budget_hint(chunks: Sequence[AsyncHZPDataParallel], num_micro_batches: int) -> str:
    """Return a hint if micro-batches gather again what free memory could keep, else ""."""
    # A CPU does not know its free memory.
    communication = chunks[0].communication
    schedule, left = communication.schedule, communication.driver.device.left_nbytes()
    is_budgeted = schedule.keep_params_nbytes or schedule.keeps_params_in_free_memory
    gathered = [unit for chunk in chunks for unit in chunk.units if not unit.is_always_unsharded]
    if left is None or is_budgeted or num_micro_batches == 1 or not gathered:
        return ""
    smallest = min(unit.layout.padded_numel * unit.dtype.itemsize for unit in gathered)
    if left < smallest:
        return ""
    return (
        f"each of {num_micro_batches} micro-batches gathers the parameters again, and "
        f"{_format_nbytes(left)} are free before the first step: --asynchzp-keep-params-gb auto "
        "keeps what there is room for"
    )
