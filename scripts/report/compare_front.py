# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of compare.py: the time of a step and the memory that a rank needs for it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import NORMAL, SIZES_MEANING, SMALL, bare
from scripts.report.compare_rows import Comparison, Row, comparisons
from scripts.report.compare_table import peak_of
from scripts.report.legends import add_legend
from scripts.testbed.contenders.side_by_side import ND, OURS, SHARDED

# Mark, colour and label of a family.
_FAMILIES = {
    OURS: ("o", styles.OURS, "AsyncHZP"),
    ND: ("s", styles.STOCK, "stock Megatron: data, tensor and pipeline parallelism"),
    SHARDED: ("^", styles.PEER, "sharded peers: Megatron-FSDP, FSDP2, DeepSpeed"),
}
_ROW_IN, _PANEL_IN = 0.19, 0.75  # inches of a row, and of a panel's title and axis


def front(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that none beats in both time and memory, the smallest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.median_ms, peak_of(row))):
        if not found or peak_of(row) < peak_of(found[-1]):
            found.append(row)
    return found[::-1]


def measured(comparison: Comparison) -> list[Row]:
    """Those whose time and peak are known, the fastest first."""
    return [row for row in comparison.rows if row.is_timed and row.peak_mb is not None]


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG."""
    figure_of(records).savefig(file, dpi=styles.DPI)


def figure_of(records: Iterable[dict]) -> Any:
    """Make a matplotlib figure: a panel for each network, a row for each contender."""
    from matplotlib.lines import Line2D

    every = comparisons(records)
    # Every step on a network contains the step without one.
    studies = [study for study in every if study.has_network] or every
    heights = [_PANEL_IN + _ROW_IN * len(measured(study)) for study in studies]
    figure = styles.new_figure(0.9 + sum(heights))
    panels = figure.subplots(
        len(studies), 2, squeeze=False, sharex="col", sharey="row", height_ratios=heights
    )
    for study, (times, peaks) in zip(studies, panels, strict=True):
        _draw_study(study, times, peaks)
    families = {row.family for study in studies for row in measured(study)}
    handles = [
        Line2D([], [], marker=mark, color=colour, linestyle="", markersize=8, label=label)
        for family, (mark, colour, label) in _FAMILIES.items()
        if family in families
    ]
    add_legend(figure, handles)
    styles.add_caption(
        figure,
        SIZES_MEANING,
        "AsyncHZP runs threaded where no other schedule is named; bold: no other contender is "
        "faster with as little memory",
    )
    return figure


def _draw_study(study: Comparison, times: Any, peaks: Any) -> None:
    """Draw each contender's step in the left plot and its peak in the right one."""
    rows = measured(study)
    best = front(rows)
    for axes, label, value in (
        (times, "step (ms), median", lambda row: row.median_ms),
        (peaks, "peak of a rank's tensors (MB)", peak_of),
    ):
        for family, (mark, colour, _) in _FAMILIES.items():
            places = [place for place, row in enumerate(rows) if row.family == family]
            values = [value(rows[place]) for place in places]
            axes.scatter(values, places, marker=mark, color=colour, s=42, zorder=2)
        axes.set_xlabel(label, fontsize=NORMAL)
        axes.margins(x=0.06)
        bare(axes, grid="both")
        axes.tick_params(labelbottom=True)
    times.set_yticks(range(len(rows)), [_short(row) for row in rows], fontsize=SMALL)
    times.set_ylim(len(rows) - 0.4, -0.6)
    for text, row in zip(times.get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if row in best else "normal")
    nodes, ranks = study.nodes, study.ranks_per_node
    styles.set_title(times, f"{nodes} nodes x {ranks} ranks, {study.profile['name']}")


def _short(row: Row) -> str:
    return row.name.replace("AsyncHZP threaded", "AsyncHZP")
