# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.faults into tables."""

from collections.abc import Sequence

from scripts.faults.cells import FAULTS, MOMENTS, Cell
from scripts.report.records import markdown_table


def _reached(lines: Sequence[dict], program: str) -> list[dict]:
    """Cells whose moment came."""
    cells = [line for line in lines if line["kind"] == "cell" and line["is_reached"]]
    return [line for line in cells if line["cell"]["program"] == program]


def slowest_s(line: dict) -> float:
    """Seconds from the fault (from SIGCONT for the rank that was stopped) until the last rank that
    can speak had ended."""
    dead = Cell(**line["cell"]).dead
    return max(one["after_s"] for rank, one in enumerate(line["ended"]) if rank not in dead)


def grid(lines: Sequence[dict], program: str) -> str:
    """Faults by moments: good cells of all, and the slowest end in seconds over the limit."""
    cells = _reached(lines, program)
    rows = []
    for fault in FAULTS:
        row = [fault]
        for moment in MOMENTS:
            here = [
                line
                for line in cells
                if (line["cell"]["fault"], line["cell"]["moment"]) == (fault, moment)
            ]
            good = sum(not line["faults"] for line in here)
            over = max((slowest_s(line) - line["limit_s"] for line in here), default=0.0)
            row.append(f"{good} of {len(here)}, {over:+.1f}" if here else "")
        rows.append(row)
    return markdown_table(["fault", *MOMENTS], rows)


def ends(lines: Sequence[dict], program: str) -> str:
    """By fault: cells, the lines of ranks that could speak, those that name the missing ranks or
    say that the store is gone, runs that went on to their end, and the slowest end."""
    rows = []
    for fault in FAULTS:
        here = [line for line in _reached(lines, program) if line["cell"]["fault"] == fault]
        if not here:
            continue
        printed = sum(len(one["lines"]) for line in here for one in line["ended"])
        asked = [named for line in here for named in line["names"].values()]
        went_on = sum(all(one["is_done"] for one in line["ended"]) for line in here)
        over = max(slowest_s(line) - line["limit_s"] for line in here)
        rows.append(
            [
                f"{fault}: {FAULTS[fault]}",
                str(len(here)),
                str(sum(not line["faults"] for line in here)),
                str(printed),
                f"{sum(asked)} of {len(asked)}" if asked else "",
                str(went_on),
                f"{over:+.1f}",
            ]
        )
    head = ["fault", "cells", "good", "lines", "name who is missing", "went on", "slowest end, s"]
    return markdown_table(head, rows)


def number_of_cells(lines: Sequence[dict], program: str) -> int:
    return len(_reached(lines, program))


def number_of_good(lines: Sequence[dict], program: str) -> int:
    """With nothing to complain of."""
    return sum(not line["faults"] for line in _reached(lines, program))
