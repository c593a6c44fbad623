# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of compare.py as the choice that users face: the time of a step over the memory
that a rank needs for it, with the front of those that nothing beats in both.
"""

from collections.abc import Iterable, Sequence
from math import hypot
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import INK, NORMAL, SIZES_MEANING, SMALL, bare
from scripts.report.compare_rows import Comparison, Row, comparisons
from scripts.report.compare_table import peak_of
from scripts.testbed.contenders.side_by_side import ND, OURS, SHARDED

# Mark, colour and what is said of a family.
_FAMILIES = {
    OURS: ("o", styles.OURS, "AsyncHZP"),
    ND: ("s", styles.STOCK, "stock Megatron: data, tensor and pipeline parallelism"),
    SHARDED: ("^", styles.PEER, "sharded peers: Megatron-FSDP, FSDP2, DeepSpeed"),
}


def front(rows: Iterable[Row]) -> list[Row]:
    """The rows than which no other is as fast with less memory, or faster with as much; those with
    the least memory first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.median_ms, peak_of(row))):
        if not found or peak_of(row) < peak_of(found[-1]):
            found.append(row)
    return found[::-1]


def measured(comparison: Comparison) -> list[Row]:
    """Those whose time and peak are known."""
    return [row for row in comparison.rows if row.is_timed and row.peak_mb is not None]


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG."""
    figure_of(records).savefig(file, dpi=styles.DPI)


def figure_of(records: Iterable[dict]) -> Any:
    """A matplotlib figure."""
    from matplotlib.lines import Line2D

    every = comparisons(records)
    # That of no network is part of the others' steps.
    found = [one for one in every if one.has_network] or every
    figure = styles.new_figure(1.2 + 3.6 * len(found))
    # A peak has the same place in every panel; with one scale of time the faster ones were empty.
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True)[:, 0]
    for comparison, axes in zip(found, panels, strict=True):
        _draw_study(comparison, axes)
    shown = [row for comparison in found for row in measured(comparison)]
    families = {row.family for row in shown}
    handles: list[Any] = [
        Line2D([], [], marker=mark, color=colour, linestyle="", markersize=8, label=what)
        for family, (mark, colour, what) in _FAMILIES.items()
        if family in families
    ]
    label = "no other is faster with as little memory"
    has_line = any(len(front(measured(comparison))) > 1 for comparison in found)
    if has_line:
        handles.append(Line2D([], [], color=INK, linestyle=":", label=label))
    styles.add_legend(figure, handles, ncols=2)
    threaded = "AsyncHZP runs threaded where no other schedule is named; bold: " + (
        "on the dotted line" if has_line else label
    )
    has_sizes = any("(" in row.name for row in shown)
    styles.add_caption(figure, *[SIZES_MEANING] * has_sizes, threaded)
    figure.draw_without_rendering()  # places the panels, which names need to be placed themselves
    for comparison, axes in zip(found, panels, strict=True):
        _name_points(axes, measured(comparison))
    return figure


def _draw_study(comparison: Comparison, axes: Any) -> None:
    rows = measured(comparison)
    best = front(rows)
    axes.plot(
        [peak_of(row) for row in best],
        [row.median_ms for row in best],
        color=INK,
        linestyle=":",
        linewidth=1.2,
        drawstyle="steps-post",
        zorder=1,
    )
    for family, (mark, colour, _) in _FAMILIES.items():
        of_family = [row for row in rows if row.family == family]
        axes.scatter(
            [peak_of(row) for row in of_family],
            [row.median_ms for row in of_family],
            marker=mark,
            color=colour,
            s=60,
            zorder=2,
        )
    nodes, ranks = comparison.nodes, comparison.ranks_per_node
    name = f"{nodes} nodes x {ranks} ranks, {comparison.profile['name']}"
    styles.set_title(axes, name)
    axes.set_xlabel("peak of a rank's tensors (MB)", fontsize=NORMAL)
    axes.set_ylabel("step (ms), median", fontsize=NORMAL)
    axes.margins(x=0.08, y=0.12)
    bare(axes, grid="both")
    axes.tick_params(labelbottom=True)


# Where a name may stand beside its point, the nearest first: offsets in points, and which end of it
# is there. A name that stands far off has a line to its point.
_NEAR = ((6, 7, "left"), (8, 0, "left"), (-8, 0, "right"))
_FAR = tuple(
    (sign * (away + abs(dy) // 6), dy, side)
    for distance in range(12, 97, 12)
    for away in (4, 30, 60)
    for dy in (distance, -distance)
    for sign, side in ((1, "left"), (-1, "right"))
)
_PLACES = _NEAR + _FAR
_LINE_FROM = 13  # points


def _name_points(axes: Any, rows: Sequence[Row]) -> None:
    """Each point's name beside it and within the frame, where neither a name nor a point is in the
    way, nor a line from a name that stands farther off."""
    from matplotlib.path import Path as Line
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    best = front(rows)
    halo = [withStroke(linewidth=2.5, foreground="white")]
    points = [axes.transData.transform((peak_of(row), row.median_ms)) for row in rows]
    frame = axes.get_window_extent()
    taken: list[Any] = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
    lines: list[Any] = []
    for row in sorted(rows, key=peak_of):
        x, y = axes.transData.transform((peak_of(row), row.median_ms))
        others = [box for box in taken if hypot((box.x0 + box.x1) / 2 - x, box.y0 + 6 - y) > 14]
        for dx, dy, side in _PLACES:
            text = axes.annotate(
                row.name.removeprefix("AsyncHZP ").removeprefix("threaded "),
                (peak_of(row), row.median_ms),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=SMALL,
                color=INK,
                weight="bold" if row in best else "normal",
                path_effects=halo,
                arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.5}
                if hypot(dx, dy) >= _LINE_FROM
                else None,
            )
            text.get_window_extent()  # places it
            box = Text.get_window_extent(text)  # without the line
            is_inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
            is_inside = is_inside and frame.y0 <= box.y0 and box.y1 <= frame.y1
            is_free = not any(box.overlaps(other) for other in taken)
            is_free = is_free and not any(other.intersects_bbox(box) for other in lines)
            line = Line([(x, y), (box.x0 if side == "left" else box.x1, (box.y0 + box.y1) / 2)])
            if hypot(dx, dy) < _LINE_FROM:
                if is_inside and is_free:
                    break
            elif is_inside and is_free:
                crossed = any(map(line.intersects_bbox, others))
                if not crossed and not any(map(line.intersects_path, lines)):
                    lines.append(line)
                    break
            if (dx, dy, side) != _PLACES[-1]:
                text.remove()
        taken.append(box)
