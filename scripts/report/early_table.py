# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The record of scripts/bench/early_update.py as a table."""

import statistics
from collections.abc import Sequence

from scripts.report.records import markdown_table

_CLIPPED = {"never": "", "always": ", always clipped"}


def early_table(lines: Sequence[dict]) -> str:
    """A row for each precision: the step over its floor, then its milliseconds."""
    columns = [f"{update}{text}" for text in _CLIPPED.values() for update in ("late", "early")]
    head, rows = ["precision", "computing alone", "communicating alone", *columns], []
    for floor in (line for line in lines if line["kind"] == "floor"):
        alone = floor["compute_ms"], floor["communicate_ms"]
        row = [floor["precision"], *(f"{ms:.0f} ms" for ms in alone)]
        for clipped in _CLIPPED:
            for update in ("late", "early"):
                steps = _steps(lines, floor["precision"], clipped, update)
                over = ratio(lines, floor["precision"], clipped, update)
                spread = f"{min(steps):.0f} to {max(steps):.0f}"
                row.append(f"**{over:.2f}**, {statistics.median(steps):.0f} ({spread})")
        rows.append(row)
    return markdown_table(head, rows)


def ratio(lines: Sequence[dict], precision: str, clipped: str, update: str) -> float:
    """The median step over the longer of computing alone and communicating alone."""
    floors = [line for line in lines if line["kind"] == "floor"]
    (floor,) = (line for line in floors if line["precision"] == precision)
    longer = max(floor["compute_ms"], floor["communicate_ms"])
    return statistics.median(_steps(lines, precision, clipped, update)) / longer


def _steps(lines: Sequence[dict], precision: str, clipped: str, update: str) -> list[float]:
    """Milliseconds of all timed steps of these runs."""
    wanted = (precision, clipped, update)
    runs = [line for line in lines if line["kind"] == "run"]
    of_runs = [one for one in runs if (one["precision"], one["clipped"], one["update"]) == wanted]
    return [ms for run in of_runs for ms in run["step_ms"]]
