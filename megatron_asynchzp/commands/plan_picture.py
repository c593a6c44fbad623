# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the pictures of an outcome: time against memory, and the timeline of the best plan."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import (
    GREEN,
    GREY,
    INK,
    NORMAL,
    PINK,
    RED,
    SMALL,
    STEP_COLOURS,
    bare,
)
from megatron_asynchzp.engine.comm import timeline
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.cluster import GIB
from megatron_asynchzp.planner.search import Candidate, Outcome
from megatron_asynchzp.planner.simulate import Interval
from megatron_asynchzp.planner.space import Space

_SHOWN_MICRO_BATCHES = 2  # of a step without a pipeline: more look the same
_LANES = ("compute", "wait", "gather", "reduce", "grad-sync", "param-sync")
_LANES_MEANING = (
    "gather, reduce: parameters and gradients among P and G ranks; grad-sync, param-sync: summed "
    "gradients and updated parameters among the others;\nwait: computation waits for one of these"
)
_FRONT = "no plan is faster with as little memory"
_WIDE = ("compute", "grad-sync", "param-sync")  # an edge would hide the bars of the others
_SCHEMES = {
    "": (styles.OURS, "o", "AsyncHZP's own sizes"),
    "ZeRO-3": (styles.PEER, "^", "ZeRO-3"),
    "HSDP": (GREEN, "D", "HSDP"),
    "distributed optimizer": (styles.STOCK, "s", "distributed optimizer"),
    "plain data parallelism": (GREY, "v", "plain data parallelism"),
}


def spans_of(best: Candidate) -> tuple[int, tuple[Interval, ...]]:
    """Return the fewest micro-batches that show a step's pattern, and stage 0's spans."""
    plan = best.plan
    shown = _SHOWN_MICRO_BATCHES if plan.parallel.pp == 1 else 2 * plan.parallel.pp
    count = min(plan.batch.num_micro_batches, shown)
    return count, best.costing.simulate(count, with_spans=True).spans[0]


def write_trace(best: Candidate, file: Path) -> None:
    spans = map(timeline.Span._make, spans_of(best)[1])
    with _naming(f"--trace {file}"):
        file.write_text(json.dumps(timeline.chrome_trace(spans, rank=0)))


def draw(outcome: Outcome, space: Space, file: Path) -> None:
    figure = styles.new_figure(7.4)
    best = outcome.best
    assert best is not None
    above, below = figure.subplots(2, 1, height_ratios=(1.15, 1))
    _draw_trade(above, outcome, space, best)
    _draw_timeline(below, best)
    styles.add_caption(figure, styles.SIZES_MEANING, _LANES_MEANING)
    with _naming(f"--picture {file}"):
        figure.savefig(file, dpi=styles.DPI)


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{flag}: {error.strerror}") from error


def _draw_trade(axes: Any, outcome: Outcome, space: Space, best: Candidate) -> None:
    shown = list(outcome.ranked)
    for scheme, (colour, marker, label) in _SCHEMES.items():
        of_scheme = [candidate for candidate in shown if candidate.scheme == scheme]
        if of_scheme:
            held = [candidate.costing.memory.total / GIB for candidate in of_scheme]
            steps = [candidate.step_s for candidate in of_scheme]
            axes.scatter(held, steps, s=42, c=colour, marker=marker, label=label, zorder=3)
    front = _front(shown)
    held, steps = zip(*front, strict=True)
    axes.step(held, steps, where="post", color=INK, linewidth=1, label=_FRONT)
    at = best.costing.memory.total / GIB, best.step_s
    axes.scatter(*at, s=190, facecolors="none", edgecolors=PINK, linewidths=2, zorder=4)
    sizes = best.plan.sizes
    label = f"chosen: ({sizes.param},{sizes.grad},{sizes.optim})"
    axes.annotate(label, at, (10, 12), textcoords="offset points", color=INK, fontsize=NORMAL)
    device = space.cluster.device
    usable = device.usable_nbytes / GIB
    axes.axvline(usable, color=RED, linestyle=":", linewidth=1.2)
    axes.annotate(
        f"{usable:g} GiB usable ",
        (usable, 0.97),
        xycoords=("data", "axes fraction"),
        ha="right",
        va="top",
        color=RED,
        fontsize=NORMAL,
    )
    axes.set_xlabel("memory of the fullest rank (GiB)", fontsize=NORMAL)
    axes.set_ylabel("step (s)", fontsize=NORMAL)
    cluster = space.cluster
    title = f"{cluster.name}, {cluster.num_ranks} ranks: time against memory of simulated plans"
    styles.set_title(axes, title)
    bare(axes, grid="both")
    axes.margins(x=0.06, y=0.16)
    axes.legend(frameon=False, fontsize=SMALL, loc="best")


def _front(shown: Sequence[Candidate]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    points = sorted((candidate.costing.memory.total / GIB, candidate.step_s) for candidate in shown)
    for held, step in points:
        if not front or step < front[-1][1]:
            front.append((held, step))
    return front


def _draw_timeline(axes: Any, best: Candidate) -> None:
    count, all_spans = spans_of(best)
    spans = [span for span in all_spans if span.lane in _LANES and span.end > span.start]
    lanes = [lane for lane in _LANES if any(span.lane == lane for span in spans)]
    for row, lane in enumerate(lanes):
        by_colour: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.lane == lane:
                kind = span.name.partition(" ")[0] if lane == "compute" else lane
                by_colour.setdefault(kind, []).append((span.start, span.end - span.start))
        for kind, pieces in by_colour.items():
            axes.broken_barh(
                pieces,
                (row - 0.38, 0.76),
                facecolors=STEP_COLOURS[kind],
                edgecolors="white",
                linewidth=0.3 if lane in _WIDE else 0,
                label=kind if lane == "compute" else None,
            )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("time after the last update began (s)", fontsize=NORMAL)
    plan = best.plan
    of = f"{count} of {plan.batch.num_micro_batches} micro-batches"
    stage = "" if plan.parallel.pp == 1 else ", first stage"
    styles.set_title(axes, f"the chosen plan's step as simulated, {of}{stage}")
    bare(axes)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=SMALL, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.16))
