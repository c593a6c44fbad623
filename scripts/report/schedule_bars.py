# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the grids of the schedule benchmark: for each cluster the step of every system over the
floor, systems of one time of update and one size of unit side by side.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import (
    BLUE,
    GREEN,
    INK,
    NORMAL,
    ORANGE,
    PINK,
    SKY,
    SMALL,
    YELLOW,
    bare,
)
from scripts.report.schedule_grid import COLUMNS, Grid, grids

_COLOURS = {
    "threaded": styles.OURS,
    "main-thread": ORANGE,
    "inline": styles.GREY,
    "baseline": GREEN,
    "HSDP": BLUE,
    "HSDP, params kept": PINK,
    "FSDP2": SKY,
    "FSDP2, params kept": YELLOW,
    "DDP": "#000000",
}
_CAPTION = (
    "threaded, main-thread and inline are AsyncHZP's schedules. They and the baseline have "
    "(P,G,O) = (node, node, world): the ranks",
    "of a node share one copy of the parameters and one of the gradients, all ranks one copy of "
    "the optimizer states.",
    "late update: after all gradients are reduced, as in Megatron; early update: of each unit as "
    "soon as its own are; halves: 2 units a block.",
    "baseline: the least code for the same sharding with threads, for one kind of model; it cannot "
    "clip where it updates early.",
    "No bar: not measured. inline ran in one cell, to show what it costs; torch's HSDP and DDP as "
    "they come update late.",
)
_WIDTH, _GAP = 1.0, 1.2


def draw(lines: Sequence[dict], file: Path) -> None:
    """Write the picture as a PNG to `file`."""
    from matplotlib.patches import Patch

    found = grids(lines)
    figure = styles.new_figure(3.2 * len(found) + 0.9)
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for grid, axes in zip(found, panels, strict=True):
        _draw_grid(grid, axes)
    shown = {name for grid in found for name in grid.systems}
    handles: list[Any] = [
        Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in shown
    ]
    styles.add_legend(figure, handles)
    styles.add_caption(figure, *_CAPTION)
    figure.savefig(file, dpi=styles.DPI)


def _draw_grid(grid: Grid, axes: Any) -> None:
    at, ticks = 0.0, []
    for column in COLUMNS:
        start = at
        for system, cells in grid.systems.items():
            if column not in cells:
                continue
            cell, ratio = cells[column], grid.ratio(system, column)
            errors = [[cell.median_ms - cell.min_ms], [cell.max_ms - cell.median_ms]]
            errors = [[value / grid.floor_ms for value in side] for side in errors]
            axes.bar(at, ratio, _WIDTH * 0.9, color=_COLOURS[system], yerr=errors, ecolor=INK)
            top = cell.max_ms / grid.floor_ms + 0.03
            axes.text(at, top, f"{ratio:.2f}", ha="center", fontsize=SMALL, color=INK)
            at += _WIDTH
        if at > start:
            ticks.append(((start + at - _WIDTH) / 2, column.replace(", ", " update,\n")))
            at += _GAP
    axes.set_xticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axes.axhline(1.0, color=INK, linewidth=0.8)
    highest = max(ratio for column in COLUMNS for _, ratio in grid.best(column))
    axes.set_ylim(0, 1.15 * highest)
    axes.set_ylabel("step / the longer of computing\nand communicating alone", fontsize=NORMAL)
    styles.set_title(axes, grid.name)
    bare(axes)
