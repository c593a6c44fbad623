# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of count_peaks.py into a table: peaks as predicted and as counted."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

MIB = 2**20
_MOST_ROWS = 5


def table(lines: Sequence[dict]) -> str:
    """A row for each of the models and pipeline stages that are predicted worst, with the higher of
    its two peaks."""
    worst_first = sorted(lines, key=lambda line: -abs(apart(line)))
    rows = [
        [
            *(str(line[key]) for key in ("model", "ranks", "stage")),
            *(f"{max(line[side].values()) / MIB:.2f}" for side in ("predicted", "counted")),
            f"{apart(line):+.1%}",
        ]
        for line in worst_first[:_MOST_ROWS]
    ]
    head = ["model", "ranks", "stage", "predicted", "counted", "apart"]
    text = markdown_table(head, rows).rstrip()
    if others := worst_first[_MOST_ROWS:]:
        text += f"\n\n{len(others)} more are at most {worst(others)} off."
    return text


def apart(line: dict) -> float:
    """How much more is predicted than was counted, of the higher of the two peaks."""
    return max(line["predicted"].values()) / max(line["counted"].values()) - 1


def worst(lines: Sequence[dict]) -> str:
    """The largest error of all peaks."""
    return f"{max(abs(apart(line)) for line in lines):.1%}"
