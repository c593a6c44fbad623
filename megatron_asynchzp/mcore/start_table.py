# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The table in the log of a start: groups, units and bytes, by formula and as allocated."""

import io
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_asynchzp.comm.collectives import AxisGroup
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.mcore.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.rounded_adam import moments_of
from megatron_asynchzp.planner.memory import Sizes, state_nbytes
from megatron_asynchzp.sharding.topology import spans_nodes
from megatron_asynchzp.zero.unit import HZPUnit

ADAM_MOMENTS_NBYTES = 8
"""Per element: two moments in fp32."""

_MAX_RANKS_SHOWN = 8


def moments_nbytes(args: Namespace) -> int:
    """Bytes per element of the optimizer's states. args: validated."""
    if args.optimizer == "sgd":
        return 4
    return sum(dtype.itemsize for dtype in moments_of(args))


def state_nbytes_by_formula(
    units: Sequence[HZPUnit], moments: int = ADAM_MOMENTS_NBYTES
) -> dict[str, float]:
    """AsyncHZP section 3 without padding, by the planner's formula. N counts each unit with the
    sizes of its own sharding group; what is not trained has parameters alone."""
    total = {"model_param": 0.0, "main_grad": 0.0, "main_param": 0.0, "optimizer_moments": 0.0}
    for unit in units:
        sizes = unit.groups.topology.sizes
        of_unit = state_nbytes(
            unit.layout.numel,
            unit.dtype.itemsize,
            Sizes(sizes.param, sizes.grad, sizes.optim),
            moments,
        )
        for state, nbytes in of_unit.items():
            total[state] += nbytes if unit.is_trained or state == "model_param" else 0.0
    return total


def state_nbytes_allocated(
    units: Sequence[HZPUnit], moments: int = ADAM_MOMENTS_NBYTES
) -> dict[str, int]:
    """Bytes of this rank's persistent buffers, and of the moments it will hold beside them."""
    total = {"model_param": 0, "main_grad": 0, "main_param": 0, "optimizer_moments": 0}
    for unit in units:
        for state, nbytes in unit.state_nbytes().items():
            total[state] += nbytes
        if unit.is_trained:
            owned = sum(fragment.numel() for fragment in unit.main_param_fragments())
            total["optimizer_moments"] += moments * owned
    return total


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


def _groups_table(groups: dict[str, ShardGroups], ranks_per_node: int) -> Table:
    table = Table(title="AsyncHZP groups of rank 0", title_justify="left")
    for column in ("group", "operation", "when", "ranks", "link"):
        table.add_column(column)

    def add(key: str, operation: str, when: str, axes: Sequence[AxisGroup]) -> None:
        for axis in axes:
            ranks = dist.get_process_group_ranks(axis.group)
            link = "between nodes" if spans_nodes(ranks, ranks_per_node) else "in one node"
            table.add_row(key, operation, when, _format_ranks(ranks), link)

    for key, group in groups.items():
        add(key, "gather parameters", "each unit, forward and backward", group.unshard)
        grads = "gradients in bf16" if group.grad_dtype == torch.bfloat16 else "gradients"
        add(key, f"reduce-scatter {grads}", "each unit, each micro-batch", group.grad_reduce)
        add(key, f"reduce-scatter {grads}", "once per step", group.grad_sync)
        add(key, f"all-reduce {grads}", "once per step (replicas)", group.replica_sync)
        add(key, "gather parameter shards", "once per step", group.param_sync)
    return table


def _states_table(
    units: Sequence[HZPUnit],
    groups: dict[str, ShardGroups],
    moments: int,
    beside: Sequence[tuple[str, float, int | None]],
) -> Table:
    formula = state_nbytes_by_formula(units, moments)
    allocated = state_nbytes_allocated(units, moments)
    sizes = {key: group.topology.sizes for key, group in groups.items()}
    columns = {"model_param": "param", "main_grad": "grad"}
    table = Table(title="Bytes per rank", title_justify="left")
    for column in ("state", "shard size", "by formula", "allocated (padding included)"):
        table.add_column(column)
    for state in formula:
        shard = ", ".join(
            f"{getattr(size, columns.get(state, 'optim'))} ({key})" for key, size in sizes.items()
        )
        table.add_row(
            state, shard, _format_nbytes(formula[state]), _format_nbytes(allocated[state])
        )
    total = [_format_nbytes(sum(of.values())) for of in (formula, allocated)]
    table.add_row("all, at rest", "", *total, style="bold")
    for kind, by_formula, held in beside:
        counted = "" if held is None else _format_nbytes(held)
        table.add_row(kind, "", _format_nbytes(by_formula), counted)
    return table


def _beside_states(
    chunks: Sequence[AsyncHZPDataParallel], whole_nbytes: int | None
) -> list[tuple[str, float, int | None]]:
    """What is held beside the states: its name, bytes by formula and as allocated."""
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
    if whole_nbytes is not None:
        units = [unit for chunk in chunks for unit in chunk.units]
        largest = max(unit.layout.numel * unit.dtype.itemsize for unit in units)
        rows.append(("whole at most, while the model was built", largest, whole_nbytes))
    return rows


def _units_table(units: Sequence[HZPUnit]) -> Table:
    """Units of equal make in one row: a deep model has hundreds that differ in a number."""
    table = Table(title="Units", title_justify="left")
    for column in ("unit", "how many", "parameters each", "gathered bytes each", "padding"):
        table.add_column(column)
    rows: dict[tuple, list[str]] = {}
    for unit in units:
        key = (unit.layout.numel, unit.layout.padded_numel, unit.dtype)
        rows.setdefault(key, []).append(unit.name)
    for (numel, padded, dtype), names in rows.items():
        name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        gathered = _format_nbytes(padded * dtype.itemsize)
        table.add_row(
            name, str(len(names)), f"{numel:,}", gathered, f"{(padded - numel) / padded:.1%}"
        )
    return table


def format_start_table(
    chunks: Sequence[AsyncHZPDataParallel],
    ranks_per_node: int,
    moments: int = ADAM_MOMENTS_NBYTES,
    whole_nbytes: int | None = None,
) -> str:
    """The whole table as text, for the rank that calls it.

    moments: bytes per element of the optimizer's states; whole_nbytes: of the parameters that were
    whole at most, while a model was built in shards.
    """
    units = [unit for chunk in chunks for unit in chunk.units]
    used = {chunk.runtime.group_keys[unit] for chunk in chunks for unit in chunk.units}
    groups = {key: group for key, group in chunks[0].groups.items() if key in used}
    text = io.StringIO()
    console = Console(file=text, width=118)
    console.print(_groups_table(groups, ranks_per_node))
    beside = _beside_states(chunks, whole_nbytes)
    console.print(_states_table(units, groups, moments, beside))
    console.print(_units_table(units))
    return text.getvalue()
