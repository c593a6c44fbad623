# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Prints an outcome: the setting, the plans as a table, and the flags of a plan."""

import io
from collections.abc import Container, Iterable, Sequence
from typing import Any

from megatron_asynchzp.planner.cluster import GIB
from megatron_asynchzp.planner.model import Model
from megatron_asynchzp.planner.search import Candidate, Outcome
from megatron_asynchzp.planner.space import Space

_WIDTH = 140


def model(understood: Model) -> str:
    """Describe the model that the planner read from the flags, so that a user can recognise it."""
    return (
        f"{understood.num_params:,} parameters, {len(understood.layers)} layers of width "
        f"{understood.hidden}, a vocabulary of {understood.vocabulary} with padding"
    )


def setting(space: Space, outcome: Outcome) -> str:
    cluster, domain = space.cluster, ""
    if cluster.nodes_per_domain > 1:
        domain = f" in domains of {cluster.ranks_per_domain}, between which they send"
    return (
        f"{cluster.name}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks{domain}, "
        f"{space.global_batch} sequences of {space.start.batch.seq_length} tokens a step; "
        f"{outcome.num_plans} plans, {outcome.num_fitting} fit, the {outcome.num_simulated} most "
        "promising were simulated"
    )


def plans(outcome: Outcome, space: Space, most: int) -> str:
    """Format the best `most` plans, the chosen one marked, and the best of each plainer scheme."""
    columns = ["", "P, G, O", "micro-batch", "recompute", "depth"]
    columns += [name.upper() for name in space.vary]
    columns += ["step s", "tokens/s", "MFU", "memory GiB", "waits s", "GB off node", "as"]
    best, shown = outcome.best, list(outcome.ranked[:most])
    for candidate in (*outcome.baselines.values(), best):
        if candidate is not None and candidate not in shown:
            shown.append(candidate)
    return grid(
        columns,
        [["*" if candidate == best else "", *_cells(candidate, space)] for candidate in shown],
    )


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    texts = ("", "P, G, O", "as", "sharding")
    text = printed(columns, rows, _WIDTH, {*columns}.difference(texts), box=None, pad_edge=False)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def printed(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    width: int,
    numbers: Container[str] = (),
    **style: Any,
) -> str:
    """Return a table of `rows` as text; the columns `numbers` stand at the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(**style)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def _cells(candidate: Candidate, space: Space) -> list[str]:
    plan, costing, step = candidate.plan, candidate.costing, candidate.step
    assert step is not None
    sizes, batch = plan.sizes, plan.batch
    return [
        f"{sizes.param}, {sizes.grad}, {sizes.optim}",
        f"{batch.num_micro_batches} x {batch.size}",
        plan.recompute.granularity,
        str(plan.schedule.depth) if sizes.param > 1 else "-",
        *(str(getattr(plan.parallel, name)) for name in space.vary),
        f"{candidate.step_s:.3f}",
        f"{candidate.tokens_per_s:,.0f}",
        f"{costing.mfu(candidate.step_s):.1%}",
        f"{costing.memory.total / GIB:.1f}",
        f"{step.worst.exposed_s:.3f}",
        f"{costing.node_nbytes / 1e9:.1f}",
        candidate.scheme,
    ]


_PARALLEL_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}


def flags(candidate: Candidate, space: Space) -> list[str]:
    """Return the flags to add to the command; of two equal flags Megatron reads the last."""
    plan, start = candidate.plan, space.start
    words = ["--use-asynchzp"]
    for state in ("param", "grad", "optim"):
        words += [f"--asynchzp-{state}-shard-size", str(getattr(plan.sizes, state))]
    if not plan.schedule.is_inline:
        words += ["--asynchzp-prefetch-depth", str(plan.schedule.depth)]
    if plan.batch.size != start.batch.size:
        words += ["--micro-batch-size", str(plan.batch.size)]
    if plan.recompute != start.recompute:
        words += _recompute_flags(plan.recompute.granularity)
    for name, flag in _PARALLEL_FLAGS.items():
        value = getattr(plan.parallel, name)
        if value != getattr(start.parallel, name):
            words += [flag, str(value)]
    if plan.parallel.sequence_parallel and not start.parallel.sequence_parallel:
        words.append("--sequence-parallel")
    return words


def _recompute_flags(granularity: str) -> list[str]:
    if granularity == "none":
        return ["(without --recompute-granularity)"]
    words = ["--recompute-granularity", granularity]
    if granularity == "full":
        words += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return words
