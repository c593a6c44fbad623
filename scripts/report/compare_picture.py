# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the records of compare.py: for each cluster and network the step of every contender, beside
the bytes that it sends off a node and the memory that a rank holds. A column has one scale, so that
networks can be compared; what a step takes without a network is part of its bar.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import INK, NORMAL, RED, SIZES_MEANING, SMALL, bare
from scripts.report.compare_rows import Comparison, Row, comparisons
from scripts.testbed.contenders.side_by_side import ND, OURS, SHARDED

_BARE = (
    "step, pale: what the network adds; hatched: its part is not known (not measured without one)"
)
_WAITS = "*: the host waits for a side stream, which an accelerator would not"
COLOURS = {OURS: styles.OURS, ND: styles.STOCK, SHARDED: styles.PEER}
MEANING = {
    OURS: "AsyncHZP",
    ND: "stock Megatron: data, tensor and pipeline parallelism",
    SHARDED: "sharded peers: Megatron-FSDP, FSDP2, DeepSpeed",
}
_PALE = 0.35


def on_networks(found: list[Comparison]) -> list[Comparison]:
    """Without that of no network, which is part of the others' steps, unless there is no other."""
    return [comparison for comparison in found if comparison.has_network] or found


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG."""
    figure_of(records).savefig(file, dpi=styles.DPI)


def figure_of(records: Iterable[dict]) -> Any:
    """A matplotlib figure. Contenders without a measurement are named beside a study."""
    from matplotlib.patches import Patch

    found = on_networks(comparisons(records))
    rows = [max(1, sum(not row.reason for row in comparison.rows)) for comparison in found]
    figure = styles.new_figure(1.3 + sum(0.24 * count + 0.9 for count in rows))
    axes = figure.subplots(
        len(found),
        3,
        squeeze=False,
        width_ratios=[2.2, 1, 1],
        height_ratios=rows,
        sharex="col",
        sharey="row",
    )
    for comparison, of_study in zip(found, axes):
        _draw_study(comparison, of_study)
    handles: list[Any] = [
        Patch(color=colour, label=MEANING[name]) for name, colour in COLOURS.items()
    ]
    styles.add_legend(figure, handles)
    waits = any(row.host_waits for comparison in found for row in comparison.rows)
    bare = any(row.bare_ms is not None for comparison in found for row in comparison.rows)
    styles.add_caption(figure, SIZES_MEANING, *[_BARE] * bare, *[_WAITS] * waits)
    return figure


def _draw_study(comparison: Comparison, axes: Any) -> None:
    rows = [row for row in comparison.rows if not row.reason][::-1]
    places = range(len(rows))
    names = [row.name + (" *" if row.host_waits else "") for row in rows]
    times, traffic, memory = axes
    for place, row in zip(places, rows):
        colour = COLOURS[row.family]
        _draw_step(times, place, row, colour, comparison.has_network)
        traffic.barh(place, row.node_mb or 0.0, color=colour, height=0.7)
        memory.barh(place, row.peak_mb or 0.0, color=colour, height=0.7, alpha=_PALE)
        memory.barh(place, row.state_mb or 0.0, color=colour, height=0.7)
    if (text := comparison.calibration) is not None:
        times.axvline(text["compute_ms"], color=INK, linewidth=1, linestyle=":")
        times.annotate(
            "compute only",
            (text["compute_ms"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=SMALL,
            color=INK,
        )
    times.set_yticks(places, names)
    times.set_ylim(-0.6, len(rows) - 0.4)
    nodes, ranks = comparison.nodes, comparison.ranks_per_node
    styles.set_title(times, f"{nodes} nodes x {ranks} ranks, {comparison.profile['name']}", pad=14)
    times.set_xlabel("step (ms): median, shortest and longest", fontsize=NORMAL)
    traffic.set_xlabel("sent by a node (MB a step)", fontsize=NORMAL)
    memory.set_xlabel("tensors of a rank (MB):\nbetween steps; pale: peak", fontsize=NORMAL)
    missing = [row.name for row in comparison.rows if row.reason]
    if missing:
        text = "not run: " + ", ".join(missing)
        traffic.set_title(text, fontsize=SMALL, color=INK, loc="left", pad=14)
    for ax in axes:
        bare(ax, grid="x")
        ax.tick_params(labelbottom=True)  # one scale, but a panel may be far from the last one


def _draw_step(times: Any, place: int, row: Row, colour: str, has_network: bool) -> None:
    inside = {"va": "center", "fontsize": SMALL}
    if not row.is_timed:
        times.text(12, place, "wrong losses: no speed", color=RED, **inside)
        return
    low, high = row.median_ms - min(row.step_ms), max(row.step_ms) - row.median_ms
    dark_ms = min(row.median_ms, row.bare_ms or row.median_ms)
    is_unknown = has_network and row.bare_ms is None
    hatch = {"hatch": "///", "edgecolor": "white", "linewidth": 0} if is_unknown else {}
    times.barh(place, dark_ms, color=colour, height=0.7, **hatch)
    times.barh(
        place,
        row.median_ms - dark_ms,
        left=dark_ms,
        color=colour,
        alpha=_PALE,
        height=0.7,
        xerr=[[low], [high]],
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
    )
    ink = INK if colour == styles.PEER else "white"
    plate = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
    times.text(12, place, f"{row.median_ms:.0f}", color=ink, weight="bold", bbox=plate, **inside)
