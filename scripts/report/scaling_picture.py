# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of scaling.py: a column for each axis, with the step, what leaves a node and
what a rank holds; solid where measured, hollow where modelled, and a line between the two.

    python -m scripts.report.scaling_picture runs/scaling/records.jsonl --output scaling.png
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_asynchzp.tools.styles import BLUE, GREEN, INK, SKY, VERMILION, bare, new_figure
from scripts.report.compare_rows import Row
from scripts.report.records import write_picture
from scripts.report.scaling_rows import AxisRows, Modelled, Place, axes_of

_STYLES = {  # markers tell contenders apart in grey
    "distributed optimizer": (BLUE, "s"),
    "Megatron-FSDP ZeRO-3": (SKY, "^"),
    "Megatron-FSDP HSDP": (GREEN, "D"),
    "AsyncHZP (node, node, world)": (VERMILION, "o"),
}
_DODGE = 0.09  # of an octave: contenders at one place stand side by side
_WIDE = 6.0  # a panel in which something grows more than that is logarithmic
_LABELS = {
    "ranks": "ranks",
    "micro-batches": "micro-batches",
    "layers": "layers",
    "sequence-length": "tokens of a sample",
    "hidden-size": "hidden size",
}


@dataclass(frozen=True)
class Panel:
    """A row of the picture: what it shows of a measured row (its value, then its ends) and of the
    model; None where it is not known. bottom: where the scale begins."""

    label: str
    of_row: Callable[[Place, Row], Sequence[float | None]]
    of_model: Callable[[Place, Modelled], float]
    bottom: float = 0.0


PANELS = (
    Panel(
        "step (s)",
        lambda place, row: [1e-3 * ms for ms in _times(row)],
        lambda place, model: 1e-3 * model.step_ms,
    ),
    Panel(
        "step / computation alone",
        lambda place, row: [ms / place.compute_ms for ms in _times(row)],
        lambda place, model: model.step_ms / model.compute_ms,
        bottom=0.9,
    ),
    Panel(
        "off a node (MB per step)",
        lambda place, row: [row.node_mb],
        lambda place, model: model.node_mb,
    ),
    Panel(
        "state of a rank (MB)",
        lambda place, row: [row.state_mb],
        lambda place, model: model.state_mb,
    ),
)


def _times(row: Row) -> list[float]:
    """Median, shortest and longest; nothing where losses were wrong."""
    return [row.median_ms, min(row.step_ms), max(row.step_ms)] if row.is_timed else []


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG. Raises RecordsError."""
    make_figure(records).savefig(file, dpi=120)


def make_figure(records: Iterable[dict]) -> Any:
    """Raises RecordsError."""
    axes = axes_of(records)
    figure = new_figure(13, 10)
    grid = figure.subplots(len(PANELS), max(1, len(axes)), squeeze=False, sharex="col")
    for axis, column in zip(axes, grid.T):
        for panel, plot in zip(PANELS, column):
            _draw(plot, axis, panel)
        _draw_computation(column, axis)
        _say_what_is_measured(column[0], axis)
        _label(column[-1], axis)
    for panel, plot in zip(PANELS, grid[:, 0]):
        plot.set_ylabel(panel.label, fontsize=9)
    _add_legend(figure, axes)
    return figure


def _draw(plot: Any, axis: AxisRows, panel: Panel) -> None:
    plot.set_xscale("log", base=2)
    for index, name in enumerate(axis.contenders):
        colour, marker = _STYLES[name]
        shift = 2 ** (_DODGE * (index - (len(axis.contenders) - 1) / 2))
        style = {"color": colour, "markersize": 4.5, "linewidth": 0.9, "zorder": 3}
        for is_measured, shape in ((True, ""), (False, marker)):
            at, values = _modelled(axis, name, panel, is_measured)
            plot.plot(
                [shift * x for x in at],
                values,
                linestyle="--",
                marker=shape,
                markerfacecolor="white",
                **style,
            )
        for place in axis.places:
            if name in place.measured:
                row, at = place.measured[name], place.at * shift
                values = [value for value in panel.of_row(place, row) if value is not None]
                plot.plot([at] * len(values[1:]), values[1:], **style)
                plot.plot([at] * len(values[:1]), values[:1], marker=marker, **style)
                if row.is_red and panel is PANELS[0]:
                    plot.text(
                        at,
                        0.02,
                        "wrong losses",
                        rotation=90,
                        fontsize=7,
                        ha="center",
                        color=colour,
                        transform=plot.get_xaxis_transform(),
                    )
    _set_scale(plot, _grows(axis, panel), panel.bottom)
    if axis.border is not None:
        plot.axvline(axis.border, color=INK, linewidth=0.8)
    bare(plot, grid="y")
    plot.tick_params(labelsize=8)


def _modelled(
    axis: AxisRows, name: str, panel: Panel, is_measured: bool
) -> tuple[list[int], list[float]]:
    """The model's curve of a contender where there are measurements, or where there are none."""
    places = [
        place
        for place in axis.places
        if name in place.modelled and place.is_measured == is_measured
    ]
    values = [panel.of_model(place, place.modelled[name]) for place in places]
    return [place.at for place in places], values


def _grows(axis: AxisRows, panel: Panel) -> bool:
    """Whether anything grows many times along the axis."""
    for name in axis.contenders:
        text = [
            value
            for is_measured in (True, False)
            for value in _modelled(axis, name, panel, is_measured)[1]
        ]
        if text and 0 < _WIDE * text[0] < text[-1]:
            return True
    return False


def _set_scale(plot: Any, grows: bool, bottom: float) -> None:
    """grows: many times along the axis, so logarithmic, with plain numbers; else from `bottom`."""
    from matplotlib.ticker import LogLocator, NullLocator

    if grows:
        plot.set_yscale("log")
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.yaxis.set_major_formatter("{x:g}")
    else:
        highest = max((max(line.get_ydata(), default=0) for line in plot.lines), default=0)
        plot.set_ylim(bottom, max(1.06 * highest, bottom + 0.1))


def _draw_computation(column: Sequence[Any], axis: AxisRows) -> None:
    """The least that a step can take, in the first panel and the second."""
    at = [place.at for place in axis.places]
    style = {"color": INK, "linewidth": 1, "linestyle": ":", "zorder": 2}
    column[0].plot(at, [1e-3 * place.emulated_ms for place in axis.places], **style)
    column[1].plot(at, [1.0] * len(at), **style)


def _say_what_is_measured(plot: Any, axis: AxisRows) -> None:
    if axis.border is None:
        return
    for words, side, x in (("measured ", "right", -2), (" modelled", "left", 2)):
        plot.annotate(
            words,
            (axis.border, 1),
            xycoords=("data", "axes fraction"),
            xytext=(x, 1),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=8,
            color=INK,
        )


def _label(plot: Any, axis: AxisRows) -> None:
    places = [place.at for place in axis.places]
    plot.set_xticks(places, [str(at) for at in places], fontsize=8 if len(places) < 7 else 7)
    plot.tick_params(axis="x", which="minor", bottom=False)
    plot.set_xlim(places[0] * 2**-0.5, places[-1] * 2**0.5)
    plot.set_xlabel(_LABELS[axis.name], fontsize=9)


def _add_legend(figure: Any, axes: list[AxisRows]) -> None:
    from matplotlib.lines import Line2D

    def line(label: str, **style: Any) -> Line2D:
        return Line2D([], [], **({"markersize": 5, "linestyle": "none"} | style), label=label)

    handles = [
        line(name, color=_STYLES[name][0], marker=_STYLES[name][1])
        for name in (axes[0].contenders if axes else ())
    ]
    hollow = {"linestyle": "--", "linewidth": 0.9, "markerfacecolor": "white"}
    handles += [
        line("measured, shortest to longest", color=INK, marker="o"),
        line("cost model", color=INK, marker="o", **hollow),
        line("computation alone", color=INK, linestyle=":", linewidth=1),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9)


if __name__ == "__main__":
    write_picture("scaling_picture", "scripts.bench.scaling", draw)
