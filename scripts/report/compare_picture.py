# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of compare.py: for each cluster and network the step of every contender, beside
the bytes that it sends off a node and the memory that a rank holds.

    python -m scripts.report.compare_picture runs/compare/records.jsonl --output compare.png
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_asynchzp.testbed.contenders.side_by_side import ND, OURS, SHARDED
from megatron_asynchzp.tools.styles import BLUE, INK, RED, SKY, VERMILION, bare, new_figure
from scripts.report.compare_rows import Comparison, comparisons
from scripts.report.records import write_picture

_MEANING = (
    "(P,G,O): ranks that share one copy of the parameters, the gradients, the optimizer states\n"
    "*: the host waits for a side stream, which an accelerator would not"
)
COLOURS = {OURS: VERMILION, ND: BLUE, SHARDED: SKY}


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG. Contenders without a measurement are named below it."""
    from matplotlib.patches import Patch

    found = comparisons(records)
    rows = [max(1, sum(not row.reason for row in comparison.rows)) for comparison in found]
    figure = new_figure(13, 1.6 + sum(0.31 * count + 1.1 for count in rows))
    axes = figure.subplots(
        len(found), 3, squeeze=False, width_ratios=[2.2, 1, 1], height_ratios=rows, sharey="row"
    )
    for comparison, of_study in zip(found, axes):
        _draw_study(comparison, of_study)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    title = "The same GPT and batches on an emulated cluster"
    figure.suptitle(f"{title}\n{_MEANING}", x=0.01, ha="left", fontsize=10)
    figure.savefig(file, dpi=120)


def _draw_study(comparison: Comparison, axes: Any) -> None:
    rows = [row for row in comparison.rows if not row.reason][::-1]
    places = range(len(rows))
    names = [row.name + (" *" if row.host_waits else "") for row in rows]
    times, traffic, memory = axes
    for place, row in zip(places, rows):
        colour = COLOURS[row.family]
        if row.is_timed:
            low, high = row.median_ms - min(row.step_ms), max(row.step_ms) - row.median_ms
            times.barh(
                place,
                row.median_ms,
                color=colour,
                height=0.7,
                xerr=[[low], [high]],
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
            )
            times.text(
                12,
                place,
                f"{row.median_ms:.0f}",
                va="center",
                color="white",
                fontsize=8,
                weight="bold",
            )
        else:
            times.text(12, place, "wrong losses: no speed", va="center", color=RED, fontsize=8)
        traffic.barh(place, row.node_mb or 0.0, color=colour, height=0.7)
        memory.barh(place, row.peak_mb or 0.0, color=colour, height=0.7, alpha=0.35)
        memory.barh(place, row.state_mb or 0.0, color=colour, height=0.7)
    if (text := comparison.calibration) is not None:
        times.axvline(text["compute_ms"], color=INK, linewidth=1, linestyle=":")
        times.annotate(
            "compute only",
            (text["compute_ms"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    times.set_yticks(places, names, fontsize=9)
    nodes, ranks = comparison.nodes, comparison.ranks_per_node
    times.set_title(
        f"{nodes} nodes x {ranks} ranks, {comparison.profile['name']}\n",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    times.set_xlabel("step (ms): median, shortest and longest", fontsize=9)
    traffic.set_xlabel("off a node (MB per step)", fontsize=9)
    memory.set_xlabel("tensors (MB): state, pale: peak", fontsize=9)
    missing = [row.name for row in comparison.rows if row.reason]
    if missing:
        text = "not run: " + ", ".join(missing)
        traffic.set_title(f"{text}\n", fontsize=7, color=INK, loc="left")
    for ax in axes:
        bare(ax, grid="x")
        ax.tick_params(axis="x", labelsize=8)


if __name__ == "__main__":
    write_picture("compare_picture", "scripts.bench.compare", draw)
