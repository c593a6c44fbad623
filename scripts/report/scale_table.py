# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The record of scripts/scale as a table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

_PHASES = "start", "step", "save", "load", "failure", "restart"


def table(lines: Sequence[dict]) -> str:
    """A row for each cost; what was computed is in italics."""
    ranks = list(dict.fromkeys(line["ranks"] for line in lines))
    head = ["", "cost", *(f"{number:,}" for number in ranks)]
    rows, shown = [], ""
    ordered = sorted(lines, key=lambda line: _PHASES.index(line["phase"]))
    for phase, what in dict.fromkeys((line["phase"], line["what"]) for line in ordered):
        row = {
            line["ranks"]: line for line in lines if (line["phase"], line["what"]) == (phase, what)
        }
        unit = row[ranks[0]]["unit"] and f" ({row[ranks[0]]['unit']})"
        cells = [_cell(row[n]["now"], row[n]["is_measured"]) for n in ranks]
        rows.append([phase * (phase != shown), what + unit, *cells])
        shown = phase
    return markdown_table(head, rows, 2)


def _cell(number: float, is_measured: bool) -> str:
    return _number(number) if is_measured else f"*{_number(number)}*"


def _number(number: float) -> str:
    if number == 0 or number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"
