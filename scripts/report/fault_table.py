# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.faults into tables."""

from collections.abc import Sequence

from scripts.faults.cells import FAULTS, Cell
from scripts.report.records import markdown_table


def _cells(lines: Sequence[dict]) -> list[dict]:
    return [line for line in lines if line["kind"] == "cell"]


def slowest_s(line: dict) -> float:
    """Return the seconds from the fault until the last rank that can speak had ended."""
    dead = Cell(**line["cell"]).dead
    return max(one["after_s"] for rank, one in enumerate(line["ended"]) if rank not in dead)


def _slowest_over(cells: Sequence[dict]) -> str:
    """Return the slowest end over the limit, and how many cells have no moment."""
    reached = [slowest_s(line) - line["limit_s"] for line in cells if line["is_reached"]]
    parts = [f"{max(reached):+.1f}"] if reached else []
    if missed := len(cells) - len(reached):
        parts.append(f"{missed} not reached")
    return ", ".join(parts)


def ends(lines: Sequence[dict]) -> str:
    """Write a row for each fault: cells, lines, names of the missing, runs that went on."""
    rows = []
    for fault in FAULTS:
        here = [line for line in _cells(lines) if line["cell"]["fault"] == fault]
        if not here:
            continue
        reached = [line for line in here if line["is_reached"]]
        printed = sum(len(one["lines"]) for line in reached for one in line["ended"])
        asked = [named for line in reached for named in line["names"].values()]
        went_on = sum(map(_went_on, reached))
        rows.append(
            [
                f"{fault}: {FAULTS[fault]}",
                str(len(here)),
                str(printed),
                f"{sum(asked)} of {len(asked)}" if asked else "",
                str(went_on),
                _slowest_over(here),
            ]
        )
    head = ["fault", "cells", "lines", "name who is missing", "went on", "slowest end, s"]
    return markdown_table(head, rows)


def number_of_cells(lines: Sequence[dict]) -> int:
    return len(_cells(lines))


def number_of_good(lines: Sequence[dict]) -> int:
    """With nothing to complain of."""
    return sum(not line["faults"] for line in _cells(lines))


def number_that_went_on(lines: Sequence[dict]) -> int:
    """Good ones whose ranks all came to the end of the run."""
    return sum(_went_on(line) and not line["faults"] for line in _cells(lines))


def _went_on(line: dict) -> bool:
    return all(one["is_done"] for one in line["ended"])
