# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws traces of one training step (--asynchzp-trace FILE) below each other on one time axis.

python -m scripts.report.plot_timeline inline.json threaded.json --output timeline.png
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import INK, SMALL
from megatron_asynchzp.commands.styles import STEP_COLOURS as COLOURS
from megatron_asynchzp.engine.comm.timeline import COMPUTE, WAIT, Span
from megatron_asynchzp.errors import ConfigurationError
from scripts.report.legends import add_legend
from scripts.report.step_trace import (
    Computation,
    Trace,
    direction_of,
    outside,
    read_trace,
    short_names,
    unit_of,
)

# Those that move bytes of the model; the comparison of the ranks' orders is too short to be seen.
LANES = {
    "gather": "parameters (all-gather)",
    "reduce": "gradients (reduce-scatter)",
    "grad-sync": "gradient shards, once a step",
    "matrices": "matrices to their owners and back (Muon)",
    "param-sync": "parameter shards, once a step",
}
ROWS = {COMPUTE: "main thread", WAIT: "wait"} | {lane: lane for lane in LANES}
LIGHTER, RECOMPUTED = 0.35, 0.6  # shares of white: every other micro-batch, recomputations
ROW_IN = 0.32
_NUMBER, _LIGHTER_MEANS = "number: the layer of a unit", "lighter: every other micro-batch"
_ENDS = "dotted: the step's ends"
MARGIN = 0.01  # of the time axis, left free on both sides


def make_figure(traces: Sequence[Trace]):
    """A matplotlib figure with one panel per trace."""
    rows = [row for row in ROWS if any(trace.lane(row) for trace in traces)]
    height = (ROW_IN * (len(rows) + 0.6) + 0.42) * len(traces) + 1.3
    figure = styles.new_figure(height)
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    first_ms = 1e3 * min(span.start for trace in traces for span in trace.spans)
    last_ms = 1e3 * max(span.end for trace in traces for span in trace.spans)
    margin_ms = MARGIN * (last_ms - first_ms)
    panels[0].set_xlim(first_ms - margin_ms, last_ms + margin_ms)
    for axes, trace in zip(panels, traces, strict=True):
        _Panel(axes, rows, trace).draw()
    panels[-1].set_xlabel("time (ms)", fontsize=styles.NORMAL)
    _add_legend(figure, traces, rows)
    has_several = any(each.batch for trace in traces for each in trace.computations)
    styles.add_caption(figure, "; ".join([_NUMBER, *[_LIGHTER_MEANS] * has_several, _ENDS]))
    return figure


def title_of(trace: Trace) -> str:
    times = trace.times
    title = (
        f"{trace.name}: step {1e3 * trace.step_s:.1f} ms, exposed communication "
        f"{1e3 * times.exposed_s:.1f} ms"
    )
    return title if times.overlap is None else f"{title}, overlap {100 * times.overlap:.0f} %"


class _Panel:
    """One trace in one pair of axes, whose limits in time are set."""

    def __init__(self, axes, rows: Sequence[str], trace: Trace):
        self.axes, self.rows, self.trace = axes, rows, trace
        low, high = axes.get_xlim()
        self._points_per_ms = 72 * (styles.WIDTH_IN - 1.1) / (high - low)
        moved = {span.name for span in trace.spans if span.lane in LANES}
        units = {each.unit for each in trace.computations} | set(map(unit_of, trace.outer))
        self._names = short_names(units | moved)

    def draw(self) -> None:
        axes = self.axes
        for row, lane in enumerate(self.rows):
            axes.axhspan(row - 0.5, row + 0.5, color="white" if row % 2 else "#f6f6f6", zorder=0)
            if lane == COMPUTE:
                self._draw_computations(row)
            elif lane == WAIT:
                self._draw_waits(row)
            else:
                self._draw_collectives(lane, row)
        for limit_s in (0.0, self.trace.step_s):
            axes.axvline(1e3 * limit_s, color=INK, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(self.rows)), [ROWS[row] for row in self.rows])
        axes.set_ylim(len(self.rows) - 0.5, -1.1)
        styles.bare(axes)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        styles.set_title(axes, title_of(self.trace))

    def _draw_computations(self, row: float) -> None:
        for span in self.trace.outer:
            if self.trace.computes_itself(span):
                for part in self._computing(span):
                    self._add_bar(part, row - 0.4, 0.8, facecolor=COLOURS[direction_of(span)])
                self._name_each(self.trace.own_parts(span), row, unit_of(span), "white")
            else:
                style = {"fill": False, "edgecolor": "#bbbbbb", "linewidth": 0.6}
                self._add_bar(span, row - 0.46, 0.92, **style)
        for each in self.trace.computations:
            light = RECOMPUTED if each.is_recomputed else LIGHTER * (each.batch % 2)
            parts = self._computing(each)
            for part in parts:
                self._add_bar(part, row - 0.4, 0.8, facecolor=_lighter(each.direction, light))
            ink = INK if each.is_recomputed else "white"
            self._name_each(parts, row, each.unit, ink)
        for phase, direction, batch in _phases(self.trace.computations):
            ms = [1e3 * phase.start, 1e3 * phase.end]
            self.axes.plot(ms, [row - 0.6] * 2, color=INK, linewidth=0.8, solid_capstyle="butt")
            for text in (f"{direction} {batch + 1}", f"{direction[0].upper()}{batch + 1}"):
                if self._add_label(phase, row - 0.83, text, INK):
                    break

    def _computing(self, whole: Span | Computation) -> list[Span]:
        """The parts of `whole` in which the main thread does not wait: it computes only then."""
        return outside(whole, self.trace.lane(WAIT))

    def _draw_waits(self, row: float) -> None:
        for span in self.trace.lane(WAIT):  # one may be within another
            self._add_bar(span, row - 0.4, 0.8, facecolor=COLOURS[WAIT], linewidth=0)

    def _draw_collectives(self, lane: str, row: float) -> None:
        tracks = _pack(self.trace.lane(lane))
        height = 0.8 / max(1, len(tracks))
        for index, track in enumerate(tracks):
            low = row - 0.4 + index * height
            for span in track:
                self._add_bar(span, low, height, facecolor=COLOURS[lane])
                if height * ROW_IN * 72 > SMALL + 2:
                    self._add_name(span, low + height / 2, span.name, INK)

    def _name_each(self, parts: Sequence[Span], row: float, unit: str, ink: str) -> None:
        for part in parts:
            self._add_name(part, row, unit, ink)

    def _add_name(self, span: Span | Computation, at: float, unit: str, ink: str) -> None:
        """The name of a unit where it fits, else the number of its layer; no part of a word."""
        name = self._names[unit]
        for text in dict.fromkeys((name, name.partition(".")[0])):
            if self._add_label(span, at, text, ink):
                return

    def _add_bar(self, span: Span | Computation, low: float, height: float, **style) -> None:
        from matplotlib.patches import Rectangle

        style = {"edgecolor": "white", "linewidth": 0.4, "zorder": 2} | style
        size_ms = 1e3 * (span.end - span.start)
        self.axes.add_patch(Rectangle((1e3 * span.start, low), size_ms, height, **style))

    def _add_label(self, span, at: float, text: str, ink: str) -> bool:
        """Write `text` in the middle of `span`; False where it does not fit."""
        size_ms = 1e3 * (span.end - span.start)
        if 0.62 * SMALL * len(text) + 2 > size_ms * self._points_per_ms:
            return False
        self.axes.text(
            1e3 * span.start + size_ms / 2,
            at,
            text,
            ha="center",
            va="center_baseline",
            fontsize=SMALL,
            color=ink,
            zorder=3,
        )
        return True


def _lighter(direction: str, share: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (value + share * (1 - value) for value in to_rgb(COLOURS[direction]))
    return red, green, blue


def _phases(computations: Sequence[Computation]) -> list[tuple[Span, str, int]]:
    """Runs of one direction in one micro-batch, each with both."""
    phases: list[tuple[Span, str, int]] = []
    for each in computations:
        direction = "backward" if each.is_recomputed else each.direction
        if not phases or phases[-1][1:] != (direction, each.batch):
            phases.append((Span(COMPUTE, direction, each.start, each.end), direction, each.batch))
        run = phases[-1][0]
        phases[-1] = run._replace(end=max(run.end, each.end)), direction, each.batch
    return phases


def _pack(spans: Iterable[Span]) -> list[list[Span]]:
    """As few tracks as possible in which no two spans overlap."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((track for track in tracks if track[-1].end <= span.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(span)
    return tracks


def _add_legend(figure, traces: Sequence[Trace], rows: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[name], label=name) for name in ("forward", "backward")]
    if any(each.is_recomputed for trace in traces for each in trace.computations):
        handles.append(Patch(color=_lighter("forward", RECOMPUTED), label="recomputation"))
    meaning = {WAIT: "main thread waits"} | LANES
    handles += [Patch(color=COLOURS[row], label=meaning[row]) for row in rows if row != COMPUTE]
    add_legend(figure, handles, ncols=4)


# ---- the command


def write_picture(files: Sequence[Path], output: Path) -> None:
    """Raises ConfigurationError."""
    save_picture(make_figure([read_trace(path) for path in files]), output)


def save_picture(figure: Any, output: Path) -> None:
    """Raises ConfigurationError."""
    if output.suffix.lower() != ".png":
        raise ConfigurationError(f"--output {output}: give a file name that ends in .png")
    try:
        figure.savefig(output, dpi=styles.DPI)
    except OSError as error:
        remedy = "name a file in a folder that exists"
        raise ConfigurationError(f"--output {output}: {error.strerror}; {remedy}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report.plot_timeline", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a trace of one step")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="the picture")
    args = parser.parse_args(argv)
    try:
        write_picture(args.files, args.output)
    except ConfigurationError as error:
        print(f"plot_timeline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
