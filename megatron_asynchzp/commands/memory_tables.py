# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a dry run is printed: groups, and memory by pipeline stage."""

import io
from collections.abc import Sequence
from dataclasses import astuple
from math import ceil

from megatron_asynchzp.commands.stages import DryRun
from megatron_asynchzp.engine.device import STAYS_FREE
from megatron_asynchzp.planner.memory import Memory

GIB = 2**30


def describe_run(found: DryRun) -> str:
    """Describe ranks, replicas and micro-batches, in one line."""
    args = found.args
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return (
        f"{args.world_size} ranks, {found.ranks_per_node} per node; "
        f"{args.data_parallel_size} data-parallel replicas, {micro_batches} micro-batches of "
        f"{args.micro_batch_size} x {args.seq_length} tokens per step"
    )


def tables(found: DryRun) -> str:
    """Format changes, groups, states and memory by stage."""
    parts = [
        *(f"set by --use-asynchzp: {line}" for line in found.lines),
        _mesh_table(found),
        _states_table(found),
        memory_table(found),
        savings_table(found),
    ]
    return "\n".join(part for part in parts if part)


def _mesh_table(found: DryRun) -> str:
    # fmt: off
    rows = [
        (kind.name, kind.shares, str(kind.size), str(kind.count), _some(kind.first),
         kind.link(found.ranks_per_node))
        for kind in found.kinds
    ]
    # fmt: on
    columns = ("groups", "share", "ranks", "how many", "the first", "link")
    return _table("Mesh", columns, rows)


def _states_table(found: DryRun) -> str:
    columns = ("stage", "ranks", "parameters on a rank", "params", "grads")
    columns += ("main params", "moments")
    rows = []
    for stage in found.stages:
        numbers = [_amount(stage.memory.at_rest[state]) for state in stage.formula]
        numel = f"{stage.numel['dense']:,}"
        if stage.numel["expert"]:
            numel += f" + {stage.numel['expert']:,} of experts"
        rows.append((str(stage.index), str(stage.num_ranks), numel, *numbers))
    of = "before sharding over data-parallel ranks"
    return _table(f"States per rank, by pipeline stage (parameters: {of})", columns, rows)


def memory_table(found: DryRun) -> str:
    """Format peaks by pipeline stage, and their parts."""
    columns = ("stage", "start", "at rest", "in flight", "activations", "logits")
    columns += ("a layer's backward", "total")
    rows = [
        (str(stage.index), *(_amount(nbytes) for nbytes in memory_columns(stage.memory)))
        for stage in found.stages
    ]
    copies = any(stage.memory.copies_beside for stage in found.stages)
    title = (
        "Memory per rank, by pipeline stage (total: the larger of start, and at rest + in flight "
        "+ activations + the larger of logits and a layer in backward"
        f"{', + what gloo copies' if copies else ''})"
    )
    return _table(title, columns, rows)


def memory_columns(memory: Memory) -> tuple[float, ...]:
    """Return bytes: start, at rest, in flight, activations, logits, a layer's backward, total.

    The backward of a layer and the logits exclude each other; the total is the higher of start and
    training.
    """
    active = memory.activations
    before = (memory.start, memory.states, memory.flying, active.kept + active.buffer)
    return (*before, active.logits, memory.working, memory.total)


def savings_table(found: DryRun) -> str:
    """Format what memory budgets save on a rank of the first stage, which communicates most."""
    if not found.savings:
        return ""
    rows = [
        (_amount(params), str(gathers), _amount(grads), str(reductions))
        for params, gathers, grads, reductions in map(astuple, found.savings)
    ]
    columns = ("--asynchzp-keep-params-gb", "gathers", "--asynchzp-keep-grads-gb", "reductions")
    return _table("What a step asks for on a rank of stage 0, by memory budgets", columns, rows)


def verdict(found: DryRun, device_nbytes: float) -> str:
    """Say in one sentence whether the fullest rank fits into a device."""
    stage = found.fullest
    total, there = (stage.memory.total + found.hccl_nbytes) / GIB, device_nbytes / GIB
    where = f"a rank of stage {stage.index} needs {total:.1f} GiB{_of_hccl(found)}, a device has "
    where += f"{there:g}"
    if total > there:
        return f"does not fit: {where}"
    left = f"{there - total:.1f} GiB are left for temporaries, fragmentation and the libraries"
    return f"fits: {where}; {left}{_of_communicators(found)}"


def _of_hccl(found: DryRun) -> str:
    if not found.hccl_nbytes:
        return ""
    number = found.communicators.in_node + found.communicators.between_nodes
    return (
        f", {_amount(found.hccl_nbytes)} of them for HCCL's buffers of the engine's {number} "
        "communicators (2 x HCCL_BUFFSIZE each, not measured)"
    )


def _of_communicators(found: DryRun) -> str:
    communicators = found.communicators
    number = communicators.in_node + communicators.between_nodes
    if not number or found.hccl_nbytes or found.args.distributed_backend != "nccl":
        return ""
    return (
        f", of which NCCL's rings of the engine's {number} communicators take about "
        f"{_amount(communicators.nbytes)} (by its defaults, not measured; NCCL_MAX_CTAS bounds it)"
    )


def budgets_to_keep(found: DryRun, device_nbytes: float) -> str:
    """Say which memory budgets a device has room for and what they save, "" for none.

    A tenth of the device stays free.
    """
    asked = found.asked_budgets
    room = found.left_of(device_nbytes) - STAYS_FREE * device_nbytes
    flags: list[str] = []
    saved: list[str] = []
    kinds = [("params", "keep_params_nbytes", "gathers")]
    if not found.args.gradient_accumulation_fusion:  # those layers write over what is kept
        kinds.append(("grads", "keep_grads_nbytes", "reductions"))
    for what, budget, operations in kinds:
        rows = [(getattr(one, operations), getattr(one, budget)) for one in found.savings]
        now = next((count for count, nbytes in rows if nbytes == asked[what]), 0)
        count, nbytes = min((row for row in rows if row[1] - asked[what] <= room), default=(now, 0))
        if count >= now:
            continue
        room -= nbytes - asked[what]
        flags.append(f"--asynchzp-keep-{what}-gb {ceil(100 * nbytes / GIB) / 100:g}")
        saved.append(f"{count} {operations} a step in place of {now}")
    if not flags:
        return ""
    return f"a device has room to keep more: with {' '.join(flags)} {' and '.join(saved)}"


def _amount(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.3g} MiB"


def _some(ranks: Sequence[int]) -> str:
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=118).print(table)
    return text.getvalue()
