# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws one training step of a pipeline, its stages below each other on one clock.

It shows each stage's computation by micro-batch, its waits and its bubbles.

    python -m scripts.report.plot_pipeline trace.json trace.stage1.json --output pipeline.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import INK, SMALL, STEP_COLOURS, bare
from megatron_asynchzp.engine.comm.timeline import WAIT, union_s
from megatron_asynchzp.errors import ConfigurationError
from scripts.report.legends import add_legend
from scripts.report.plot_timeline import save_picture
from scripts.report.step_trace import Computation, Trace, read_trace

_LANES = ("gather", "reduce")  # below each stage: what was on its way, as thin lines
_PALER = 0.45  # share of white in every other micro-batch
_STAGE_IN = 0.8
_CAPTION = (
    "number: the micro-batch, after the point the model chunk; idle: the share of the step in "
    "which a stage neither computes nor waits for our collectives"
)


class Phase(NamedTuple):
    """A chunk's forward or backward of one micro-batch (both counted from 0), in seconds."""

    direction: str
    chunk: int
    batch: int
    start: float
    end: float


def phases(computations: Sequence[Computation]) -> list[Phase]:
    """Return the computations that no other phase interrupts."""
    found: list[Phase] = []
    for each in computations:
        direction = "backward" if each.is_recomputed else each.direction
        kind = direction, chunk_of(each.unit), each.batch
        if found and found[-1][:3] == kind:
            found[-1] = found[-1]._replace(end=max(found[-1].end, each.end))
        else:
            found.append(Phase(*kind, each.start, each.end))
    return found


def chunk_of(unit: str) -> int:
    """Which model chunk of its rank a unit belongs to: 0 where its name has none."""
    first, _, _rest = unit.partition(".")
    digits = first.removeprefix("chunk")
    return int(digits) if first.startswith("chunk") and digits.isdigit() else 0


def idle_share(trace: Trace) -> float:
    """The part of the step in which a stage neither computed nor waited for our collectives."""
    busy = [*trace.computation_spans, *trace.lane(WAIT)]
    return 1 - union_s(busy) / trace.step_s


def make_figure(traces: Sequence[Trace]) -> Any:
    """A matplotlib figure with a row per stage, first stage first."""
    from matplotlib.patches import Patch

    figure = styles.new_figure(1.4 + _STAGE_IN * len(traces))
    axes = figure.subplots()
    first = min(trace.began_s for trace in traces)
    for row, trace in enumerate(traces):
        _draw_stage(axes, row, trace, 1e3 * (trace.began_s - first))
    axes.set_yticks(
        range(len(traces)),
        [f"stage {row}\nidle {100 * idle_share(trace):.0f} %" for row, trace in enumerate(traces)],
    )
    axes.set_ylim(len(traces) - 0.45, -0.55)
    axes.set_xlabel("time (ms)", fontsize=styles.NORMAL)
    bare(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    meaning = {name: name for name in ("forward", "backward")}
    meaning |= {WAIT: "waits for parameters or gradients"} | {lane: lane for lane in _LANES}
    handles = [Patch(color=STEP_COLOURS[name], label=label) for name, label in meaning.items()]
    add_legend(figure, handles)
    styles.add_caption(figure, _CAPTION)
    return figure


def _draw_stage(axes: Any, row: int, trace: Trace, shift_ms: float) -> None:
    from matplotlib.colors import to_rgb

    chunks = {chunk_of(each.unit) for each in trace.computations}
    points_per_ms = 72 * (styles.WIDTH_IN - 1.5) / (1e3 * trace.step_s)
    for phase in phases(trace.computations):
        start, size = shift_ms + 1e3 * phase.start, 1e3 * (phase.end - phase.start)
        paler = _PALER * (phase.batch % 2)
        colour = tuple(v + paler * (1 - v) for v in to_rgb(STEP_COLOURS[phase.direction]))
        axes.broken_barh([(start, size)], (row - 0.4, 0.5), facecolors=[colour], edgecolor="white")
        text = str(phase.batch + 1) + (f".{phase.chunk}" if len(chunks) > 1 else "")
        if 5.0 * len(text) < size * points_per_ms:
            middle = start + size / 2, row - 0.15
            style = {"ha": "center", "va": "center", "fontsize": SMALL}
            axes.annotate(text, middle, color=INK if paler else "white", **style)
    _draw_spans(axes, trace.lane(WAIT), (row - 0.4, 0.5), STEP_COLOURS[WAIT], shift_ms)
    for index, lane in enumerate(_LANES):
        place = row + 0.15 + 0.13 * index, 0.11
        _draw_spans(axes, trace.lane(lane), place, STEP_COLOURS[lane], shift_ms)


def _draw_spans(axes: Any, spans: Sequence, place: tuple, colour: str, shift_ms: float) -> None:
    bars = [(shift_ms + 1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans]
    axes.broken_barh(bars, place, facecolors=colour, linewidth=0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report.plot_pipeline", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="one trace per stage, first stage first"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="the picture")
    args = parser.parse_args(argv)
    try:
        save_picture(make_figure([read_trace(path) for path in args.files]), args.output)
    except ConfigurationError as error:
        print(f"plot_pipeline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
