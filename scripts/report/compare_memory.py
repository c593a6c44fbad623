# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the rows of compare.py into an order of time at equal or less memory: for each contender
the fastest one that holds no more than it does, at rest and at the peak of a step.
"""

from collections.abc import Callable

from scripts.report.compare_rows import Comparison, Row
from scripts.report.compare_table import (
    HEAD,
    beaten_line,
    behind_lines,
    calibration_lines,
    cells,
    setting,
)
from scripts.report.records import markdown_table
from scripts.testbed.cpu_usage import FOREIGN_LIMIT


def fastest_within(comparison: Comparison, row: Row, memory: Callable[[Row], float]) -> Row:
    """The fastest contender that holds at most what `row` holds, which may be `row`."""
    return next(
        other for other in comparison.rows if other.is_timed and memory(other) <= memory(row)
    )


def state_of(row: Row) -> float:
    return float("inf") if row.state_mb is None else row.state_mb


def peak_of(row: Row) -> float:
    return float("inf") if row.peak_mb is None else row.peak_mb


def measured_table(comparison: Comparison) -> str:
    """Everything that was measured, in the order of time."""
    nodes, ranks = comparison.nodes, comparison.ranks_per_node
    lines = [f"{nodes} nodes x {ranks} ranks; {setting(comparison)}", ""]
    if comparison.calibration is not None:
        lines += [*calibration_lines(comparison.calibration), ""]
    rows = [cells(row, comparison.best_nd) for row in comparison.rows]
    lines.append(markdown_table(HEAD, rows, num_left=2).rstrip())
    if text := beaten_line(comparison):
        lines += ["", text]
    if behind := behind_lines(comparison):
        lines += ["", *behind]
    notes = dict.fromkeys(row.note for row in comparison.rows if row.note)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    busy = [row.name for row in comparison.rows if row.foreign > FOREIGN_LIMIT]
    text = f"Others used more than {FOREIGN_LIMIT:.0%} of the machine in"
    if busy:
        lines += ["", f"{text} every run of {', '.join(busy)}: these times are not to be quoted."]
    else:
        lines += ["", f"{text} no run that is shown."]
    return "\n".join(lines)


def memory_table(comparison: Comparison) -> str:
    """Who is the fastest at no more memory. A row that is its own answer is on the frontier."""
    head = "| contender | step ms | MB at rest | fastest with no more at rest "
    lines = [head + "| MB at peak | fastest with no more at peak |", "|---|---:|---:|---|---:|---|"]
    for row in comparison.rows:
        if row.is_timed and row.state_mb is not None:
            text = [
                f"{memory(row):.2f} | {_answer(comparison, row, memory)}"
                for memory in (state_of, peak_of)
            ]
            name = f"{row.name} (disturbed)" if row.foreign > FOREIGN_LIMIT else row.name
            lines.append(f"| {name} | {row.median_ms:.0f} | {' | '.join(text)} |")
    return "\n".join(lines)


def _answer(comparison: Comparison, row: Row, memory: Callable[[Row], float]) -> str:
    fastest = fastest_within(comparison, row, memory)
    return "itself" if fastest is row else f"{fastest.name}, {fastest.median_ms:.0f}"
