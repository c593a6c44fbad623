# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a dry run: groups, and memory by pipeline stage."""

from collections.abc import Sequence
from dataclasses import astuple
from math import ceil

from megatron_asynchzp.commands.plan_table import printed
from megatron_asynchzp.commands.stages import DryRun
from megatron_asynchzp.engine.device import STAYS_FREE
from megatron_asynchzp.mcore.flags.arguments import schedule_of
from megatron_asynchzp.planner.memory import Memory

GIB = 2**30


def describe_run(run: DryRun) -> str:
    args = run.args
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return (
        f"{args.world_size} ranks, {run.ranks_per_node} per node; "
        f"{args.data_parallel_size} data-parallel replicas, {micro_batches} micro-batches of "
        f"{args.micro_batch_size} x {args.seq_length} tokens per step"
    )


def tables(run: DryRun) -> str:
    parts = [
        *(f"set by --use-asynchzp: {line}" for line in run.lines),
        _mesh_table(run),
        _states_table(run),
        memory_table(run),
        savings_table(run),
        registered_line(run),
    ]
    return "\n".join(part for part in parts if part)


def _mesh_table(run: DryRun) -> str:
    # fmt: off
    rows = [
        (kind.name, kind.shares, str(kind.size), str(kind.count), _some(kind.first),
         kind.link(run.ranks_per_node))
        for kind in run.kinds
    ]
    # fmt: on
    columns = ("groups", "share", "ranks", "how many", "the first", "link")
    return _table("Mesh", columns, rows)


def _states_table(run: DryRun) -> str:
    columns = ("stage", "ranks", "parameters on a rank", "params", "grads")
    columns += ("main params", "moments")
    rows = []
    for stage in run.stages:
        numbers = [_amount(stage.memory.at_rest[state]) for state in stage.formula]
        numel = f"{stage.numel['dense']:,}"
        if stage.numel["expert"]:
            numel += f" + {stage.numel['expert']:,} of experts"
        rows.append((str(stage.index), str(stage.num_ranks), numel, *numbers))
    of = "before sharding over data-parallel ranks"
    return _table(f"States per rank, by pipeline stage (parameters: {of})", columns, rows)


def memory_table(run: DryRun) -> str:
    columns = ("stage", "start", "at rest", "in flight", "activations", "logits")
    columns += ("a layer's backward", "total")
    rows = [
        (str(stage.index), *(_amount(nbytes) for nbytes in memory_columns(stage.memory)))
        for stage in run.stages
    ]
    copies = any(stage.memory.copies_beside for stage in run.stages)
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


def savings_table(run: DryRun) -> str:
    """Format what memory budgets save on a rank of the first stage, which communicates most."""
    if not run.savings:
        return ""
    rows = [
        (_amount(params), str(gathers), _amount(grads), str(reductions))
        for params, gathers, grads, reductions in map(astuple, run.savings)
    ]
    columns = ("--asynchzp-keep-params-gb", "gathers", "--asynchzp-keep-grads-gb", "reductions")
    return _table("What a step asks for on a rank of stage 0, by memory budgets", columns, rows)


def registered_line(run: DryRun) -> str:
    if not (domain := run.args.use_asynchzp and schedule_of(run.args).registers_memory):
        return ""
    arenas = ("gathered parameters", "gradients to reduce", "kept parameters")
    regions = [run.fullest.memory.in_flight.get(kind) for kind in arenas]
    segments = " + ".join(_amount(nbytes) for nbytes in regions if nbytes)
    return (
        f"registered with NCCL, for groups within {domain} ranks: segments of {segments}; each "
        "communicator reserves its ranks x a GPU's memory, rounded up to 4 GiB, of virtual "
        "addresses; symmetric kernels take 1 to 5 SMs in place of 24 (published, not measured)"
    )


def verdict(run: DryRun, device_nbytes: float) -> str:
    stage = run.fullest
    total, there = (stage.memory.total + run.hccl_nbytes) / GIB, device_nbytes / GIB
    need = f"a rank of stage {stage.index} needs {total:.1f} GiB{_of_hccl(run)}, a device has "
    need += f"{there:g}"
    if total > there:
        return f"does not fit: {need}"
    left = f"{there - total:.1f} GiB are left for temporaries, fragmentation and the libraries"
    return f"fits: {need}; {left}{_of_communicators(run)}"


def _of_hccl(run: DryRun) -> str:
    if not run.hccl_nbytes:
        return ""
    number = run.communicators.in_node + run.communicators.between_nodes
    return (
        f", {_amount(run.hccl_nbytes)} of them for HCCL's buffers of the engine's {number} "
        "communicators (2 x HCCL_BUFFSIZE each, not measured)"
    )


def _of_communicators(run: DryRun) -> str:
    communicators = run.communicators
    number = communicators.in_node + communicators.between_nodes
    if not number or run.hccl_nbytes or run.args.distributed_backend != "nccl":
        return ""
    return (
        f", of which NCCL's rings of the engine's {number} communicators take about "
        f"{_amount(communicators.nbytes)} (by its defaults, not measured; NCCL_MAX_CTAS bounds it)"
    )


def budgets_to_keep(run: DryRun, device_nbytes: float) -> str:
    """Say which budgets fit, with a tenth of the device free, and what they save; "" for none."""
    asked = run.asked_budgets
    room = run.left_of(device_nbytes) - STAYS_FREE * device_nbytes
    flags: list[str] = []
    saved: list[str] = []
    kinds = [("params", "keep_params_nbytes", "gathers")]
    if not run.args.gradient_accumulation_fusion:  # those layers overwrite kept gradients
        kinds.append(("grads", "keep_grads_nbytes", "reductions"))
    for kind, budget, operations in kinds:
        rows = [(getattr(saving, operations), getattr(saving, budget)) for saving in run.savings]
        now = next((count for count, nbytes in rows if nbytes == asked[kind]), 0)
        count, nbytes = min((row for row in rows if row[1] - asked[kind] <= room), default=(now, 0))
        if count >= now:
            continue
        room -= nbytes - asked[kind]
        flags.append(f"--asynchzp-keep-{kind}-gb {ceil(100 * nbytes / GIB) / 100:g}")
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
    return printed(columns, rows, 118, title=title, title_justify="left")
