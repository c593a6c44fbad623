# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of compare.py: for each cluster and network the step of every contender, beside
the bytes that it sends off a node and the memory that a rank holds.

    python scripts/report/compare_picture.py runs/compare/records.jsonl --output compare.png
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.report.compare_rows import ND, OURS, SHARDED, Comparison, comparisons

# Okabe and Ito's colours, told apart with any colour vision and in grey.
COLOURS = {OURS: "#B03A00", ND: "#0072B2", SHARDED: "#56B4E9"}
_INK, _RED = "#333333", "#D00000"


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG. Contenders without a measurement are named below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = comparisons(records)
    rows = [max(1, sum(not row.reason for row in comparison.rows)) for comparison in found]
    figure, axes = pyplot.subplots(
        len(found),
        3,
        figsize=(13, 1.6 + sum(0.31 * count + 1.1 for count in rows)),
        squeeze=False,
        width_ratios=[2.2, 1, 1],
        height_ratios=rows,
        sharey="row",
        layout="constrained",
    )
    for comparison, of_study in zip(found, axes):
        _draw_study(comparison, of_study)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="outside upper right", ncols=3, frameon=False)
    title = "The same GPT and batches on an emulated cluster"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


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
                error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2},
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
            times.text(12, place, "wrong losses: no speed", va="center", color=_RED, fontsize=8)
        traffic.barh(place, row.node_mb or 0.0, color=colour, height=0.7)
        memory.barh(place, row.peak_mb or 0.0, color=colour, height=0.7, alpha=0.35)
        memory.barh(place, row.state_mb or 0.0, color=colour, height=0.7)
    if (told := comparison.calibration) is not None:
        times.axvline(told["compute_ms"], color=_INK, linewidth=1, linestyle=":")
        times.annotate(
            "compute only",
            (told["compute_ms"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            color=_INK,
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
        told = "not run: " + ", ".join(missing)
        traffic.set_title(f"{told}\n", fontsize=7, color=_INK, loc="left")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(axis="x", labelsize=8)


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[2] != "--output" or not Path(sys.argv[1]).is_file():
        sys.exit("usage: compare_picture.py FILE --output PNG    FILE: records.jsonl of compare.py")
    draw(map(json.loads, Path(sys.argv[1]).read_text().splitlines()), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
