# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the grids of the schedule benchmark: for each cluster the step of every system over the
floor, systems of one time of update and one size of unit side by side.

    python -m scripts.report.schedule_bars runs/schedules.jsonl --output schedules.png
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_asynchzp.tools.styles import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    bare,
    new_figure,
)
from scripts.report.records import write_picture
from scripts.report.schedule_grid import COLUMNS, Grid, grids

_COLOURS = {
    "threaded": VERMILION,
    "main-thread": ORANGE,
    "inline": GREY,
    "baseline": GREEN,
    "HSDP": BLUE,
    "FSDP2": SKY,
    "DDP": "#000000",
}
_WIDTH, _GAP = 1.0, 1.2


def draw(lines: Sequence[dict], file: Path) -> None:
    """Write the picture as a PNG to `file`."""
    found = grids(lines)
    figure = new_figure(9, 3.2 * len(found) + 0.6)
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for grid, axes in zip(found, panels, strict=True):
        _draw_grid(grid, axes)
    shown = {name for grid in found for name in grid.systems}
    handles = [_patch(colour, name) for name, colour in _COLOURS.items() if name in shown]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(file, dpi=120)


def _patch(colour: str, name: str):
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name)


def _draw_grid(grid: Grid, axes) -> None:
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
            axes.text(at, top, f"{ratio:.2f}", ha="center", fontsize=8, color=INK)
            at += _WIDTH
        if at > start:
            ticks.append(((start + at - _WIDTH) / 2, column.replace(", ", " update,\n")))
            at += _GAP
    axes.set_xticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axes.axhline(1.0, color=INK, linewidth=0.8)
    highest = max(ratio for column in COLUMNS for _, ratio in grid.best(column))
    axes.set_ylim(0, 1.15 * highest)
    axes.set_ylabel("step / the longer of computing\nand communicating alone")
    axes.set_title(grid.name, loc="left", fontsize=10)
    bare(axes)


if __name__ == "__main__":
    write_picture("schedule_bars", "scripts.bench.bench_schedules", draw)
