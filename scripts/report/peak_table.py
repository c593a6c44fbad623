# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of count_peaks.py into a table: peaks as predicted and as counted."""

from collections.abc import Sequence

MIB = 2**20
_MOST_ROWS = 5


def table(lines: Sequence[dict]) -> str:
    """A row for each of the models and pipeline stages that are predicted worst, with the higher of
    its two peaks."""
    columns = ("model", "ranks", "stage", "predicted", "counted", "apart")
    rows = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    worst_first = sorted(lines, key=lambda line: -abs(apart(line)))
    for line in worst_first[:_MOST_ROWS]:
        numbers = [f"{max(line[side].values()) / MIB:.2f}" for side in ("predicted", "counted")]
        cells = (line["model"], str(line["ranks"]), str(line["stage"]), *numbers)
        rows.append(f"| {' | '.join(cells)} | {apart(line):+.1%} |")
    text = "\n".join(rows)
    if others := worst_first[_MOST_ROWS:]:
        text += f"\n\n{len(others)} more are at most {worst(others)} off."
    return text


def apart(line: dict) -> float:
    """How much more is predicted than was counted, of the higher of the two peaks."""
    return max(line["predicted"].values()) / max(line["counted"].values()) - 1


def worst(lines: Sequence[dict]) -> str:
    """The largest error of all peaks."""
    return f"{max(abs(apart(line)) for line in lines):.1%}"
