# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of scaling.py: along an axis the step, what a node sends and what a rank holds,
measured as marks and modelled as lines.

    python -m scripts.report.scaling_picture runs/scaling/records.jsonl --output scaling.png

Of several axes the first is in scaling.png, each other one in scaling-AXIS.png.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_asynchzp.tools import styles
from megatron_asynchzp.tools.styles import GREEN, INK, NORMAL, SMALL, bare
from scripts.report.compare_rows import Row
from scripts.report.records import write_picture
from scripts.report.scaling_rows import AxisRows, Modelled, axes_of

_STYLES = {  # a marker beside the colour, for a print in grey
    "distributed optimizer": (styles.STOCK, "s"),
    "Megatron-FSDP ZeRO-3": (styles.PEER, "^"),
    "Megatron-FSDP HSDP": (GREEN, "D"),
    "AsyncHZP (node, node, world)": (styles.OURS, "o"),
}
_SHADE = "#f0f0f0"
_WIDEST, _NARROWER = 3.4, 0.7  # points: of two lines at one place both are seen
_DODGE = 0.11  # of an octave: marks at one place stand side by side
_WIDE = 6.0  # a panel in which something grows more than that is logarithmic
_LABELS = {
    "ranks": "ranks",
    "micro-batches": "micro-batches",
    "layers": "layers",
    "sequence-length": "tokens of a sample",
    "hidden-size": "hidden size",
}
_CAPTION = (
    "Marks are measured, from the shortest to the longest step, with all ranks on the {cpus} cores "
    "of one machine. Lines are the cost model's,",
    "which is given the emulated computation and knows neither jitter nor shared cores: how far a "
    "mark is above its line is what it leaves out.",
    "In the grey part nothing was measured. (node, node, world): the ranks of a node share one "
    "copy of the parameters and one of the gradients,",
    "all ranks one copy of the optimizer states.",
)


@dataclass(frozen=True)
class Panel:
    """What it shows of a measured row (its value, then its ends) and of the model; None where it is
    not known. from_zero: whether the scale begins there."""

    title: str
    of_row: Callable[[Row], Sequence[float | None]]
    of_model: Callable[[Modelled], float]
    from_zero: bool = True


PANELS = (
    Panel("step (s)", lambda row: _times(row), lambda model: 1e-3 * model.step_ms, False),
    Panel("sent by a node (MB a step)", lambda row: [row.node_mb], lambda model: model.node_mb),
    Panel("held by a rank (MB)", lambda row: [row.state_mb], lambda model: model.state_mb),
)


def _times(row: Row) -> list[float]:
    """Median, shortest and longest; nothing where losses were wrong."""
    if not row.is_timed:
        return []
    return [1e-3 * ms for ms in (row.median_ms, min(row.step_ms), max(row.step_ms))]


def draw(records: Iterable[dict], file: Path) -> None:
    """Write a PNG for each axis. Raises RecordsError."""
    records = list(records)
    for index, axis in enumerate(axes_of(records)):
        path = file.with_stem(f"{file.stem}-{axis.name}") if index else file
        make_figure(records, axis).savefig(path, dpi=styles.DPI)


def make_figure(records: Iterable[dict], axis: AxisRows) -> Any:
    """axis: one of those of the records."""
    figure = styles.new_figure(5.2)
    panels = figure.subplots(1, len(PANELS), width_ratios=(1.3, 1, 1))
    for panel, plot in zip(PANELS, panels, strict=True):
        _draw(plot, axis, panel)
    at = [place.at for place in axis.places]
    emulated = [1e-3 * place.emulated_ms for place in axis.places]
    panels[0].plot(at, emulated, color=INK, linewidth=1, linestyle=":", zorder=2)
    _add_legend(figure, axis)
    cpus = next((one["cpus"] for one in records if one["kind"] == "machine"), "few")
    styles.add_caption(figure, *(line.format(cpus=cpus) for line in _CAPTION))
    return figure


def _draw(plot: Any, axis: AxisRows, panel: Panel) -> None:
    highest = lowest = 0.0
    for index, name in enumerate(axis.contenders):
        shift = 2 ** (_DODGE * (index - (len(axis.contenders) - 1) / 2))
        places = [place for place in axis.places if name in place.emulated]
        curve = [panel.of_model(place.emulated[name]) for place in places]
        colour, marker = _STYLES[name]
        line = {"color": colour, "linewidth": _WIDEST - _NARROWER * index, "zorder": 3}
        plot.plot([place.at for place in places], curve, **line)
        highest, lowest = max([highest, *curve]), min([lowest or curve[0], *curve])
        for place in axis.places:
            if name in place.measured:
                values = panel.of_row(place.measured[name])
                highest = max([highest, *filter(None, values)])
                _draw_measured(plot, place.at * shift, values, colour, marker)
                if place.measured[name].is_red and panel is PANELS[0]:
                    _add_text(plot, place.at, 0.02, "wrong losses", rotation=90, color=colour)
    _set_scales(plot, axis, panel, lowest, highest)
    _shade(plot, axis)
    styles.set_title(plot, panel.title)
    plot.set_xlabel(_LABELS[axis.name], fontsize=NORMAL)
    bare(plot, grid="y")


def _draw_measured(
    plot: Any, at: int, values: Sequence[float | None], colour: str, marker: str
) -> None:
    known = [value for value in values if value is not None]
    if not known:
        return
    style = {"color": colour, "markersize": 6, "markeredgecolor": "white", "zorder": 4}
    plot.plot([at] * len(known[1:]), known[1:], linewidth=2, **style)
    plot.plot([at], known[:1], marker=marker, linestyle="none", **style)


def _set_scales(plot: Any, axis: AxisRows, panel: Panel, lowest: float, highest: float) -> None:
    """Along the axis by octaves; upwards by decades where something grows many times."""
    from matplotlib.ticker import LogLocator, NullLocator

    plot.set_xscale("log", base=2)
    at = [place.at for place in axis.places]
    plot.set_xticks(at, [str(one) for one in at], rotation=90 if len(at) > 6 else 0)
    plot.tick_params(axis="x", which="minor", bottom=False)
    plot.set_xlim(at[0] * 2**-0.5, at[-1] * 2**0.5)
    if highest > _WIDE * lowest > 0:
        plot.set_yscale("log")
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.yaxis.set_major_formatter("{x:g}")
    else:
        low = 0.0 if panel.from_zero else 0.85 * lowest
        plot.set_ylim(low, highest + 0.08 * (highest - low))


def _shade(plot: Any, axis: AxisRows) -> None:
    """What is beyond the measurements, if there are any."""
    if axis.border is not None:
        end = plot.get_xlim()[1]
        plot.axvspan(axis.border, end, color=_SHADE, zorder=0)
        _add_text(plot, (axis.border * end) ** 0.5, 0.02, "modelled only", color=INK)


def _add_text(plot: Any, at: float, height: float, text: str, **style: Any) -> None:
    """height: as a part of the plot's."""
    transform = plot.get_xaxis_transform()
    style = {"fontsize": SMALL, "ha": "center", "va": "bottom"} | style
    plot.text(at, height, text, transform=transform, zorder=5, **style)


def _add_legend(figure: Any, axis: AxisRows) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_STYLES[name][0], marker=_STYLES[name][1], linewidth=1.3, label=name)
        for name in axis.contenders
    ]
    dotted = {"color": INK, "linestyle": ":", "linewidth": 1}
    handles.append(Line2D([], [], label="emulated computation alone", **dotted))
    styles.add_legend(figure, handles, ncols=3)


if __name__ == "__main__":
    write_picture("scaling_picture", "scripts.bench.scaling", draw)
