# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The record of scripts/scale as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from megatron_asynchzp.commands import styles
from scripts.report.records import markdown_table

_BEFORE_AT = 16_384
_DRAWN = (
    ("start", "groups: lists of others"),
    ("step", "its latency between G, O and P"),
    ("save", "plan checked: CPU of rank 0"),
    ("save", "index: its file"),
    ("load", "own parts found: CPU of a rank"),
    ("failure", "store: bytes"),
)
_LEAST = 1e-3
_PHASES = "start", "step", "save", "load", "failure", "restart"


def table(lines: Sequence[dict]) -> str:
    """A row for each cost; what was computed is in italics."""
    ranks = list(dict.fromkeys(line["ranks"] for line in lines))
    at = _BEFORE_AT if _BEFORE_AT in ranks else ranks[-1]
    head = ["", "cost", *(f"{number:,}" for number in ranks), f"before, at {at:,}"]
    rows, shown = [], ""
    ordered = sorted(lines, key=lambda line: _PHASES.index(line["phase"]))
    for phase, what in dict.fromkeys((line["phase"], line["what"]) for line in ordered):
        row = {
            line["ranks"]: line for line in lines if (line["phase"], line["what"]) == (phase, what)
        }
        unit = row[at]["unit"] and f" ({row[at]['unit']})"
        cells = [_cell(row[n]["now"], row[n]["is_measured"]) for n in ranks]
        rows.append(
            [phase * (phase != shown), what + unit, *cells, _cell(row[at]["before"], False)]
        )
        shown = phase
    return markdown_table(head, rows, 2)


def draw(lines: Sequence[dict], file: Path) -> None:
    """Write the picture as a PNG: six costs over ranks, before and after."""
    figure = styles.new_figure(5.6)
    panels = figure.subplots(2, 3).flat
    for (phase, what), axes in zip(_DRAWN, panels, strict=True):
        row = [line for line in lines if (line["phase"], line["what"]) == (phase, what)]
        ranks = [line["ranks"] for line in row]
        for when, colour, mark in (("before", styles.GREY, "s"), ("now", styles.OURS, "o")):
            values = [max(_LEAST, line[when]) for line in row]
            axes.plot(ranks, values, color=colour, marker=mark, markersize=4, label=when)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks], rotation=30)
        axes.minorticks_off()
        axes.set_ylabel(row[0]["unit"], fontsize=styles.NORMAL)
        styles.set_title(axes, f"{phase}, {what}")
        styles.bare(axes, grid="y")
    styles.add_legend(figure, axes.get_legend_handles_labels()[0])
    styles.add_caption(
        figure,
        "Over ranks, both scales logarithmic; 0 is drawn as 0.001. Before: computed from what one "
        "item costs.",
    )
    figure.savefig(file, dpi=styles.DPI)


def _cell(number: float | None, is_measured: bool) -> str:
    if number is None:
        return ""
    return _number(number) if is_measured else f"*{_number(number)}*"


def _number(number: float) -> str:
    if number == 0 or number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"
