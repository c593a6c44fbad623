# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of bench_device into a Markdown table: the step over the floor."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

_HEAD = ["blocks", "sizes", "hardware queues"]


def device_table(lines: Sequence[dict]) -> str:
    """Write a row for each model, sizes and number of queues, and a column for each contender.

    A cell has the least and the most of all launch orders and hosts. Rows that differ in their
    queues alone become one.
    """
    steps = [line for line in lines if line.get("kind") == "step"]
    contenders = list(dict.fromkeys(line["contender"] for line in steps))
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for line in steps:
        p, g, o = line["sizes"]
        setting = str(line["model"]["blocks"]), f"P{p} G{g} O{o}", str(line["queues"])
        # No speed without correctness.
        is_right = line.get("is_right", True)
        cell = f"{line['step_ms'] / line['floor_ms']:.2f}" if is_right else "wrong losses"
        rows.setdefault(setting, {}).setdefault(line["contender"], []).append(cell)
    queues: dict[tuple[str, ...], list[str]] = {}
    for (*setting, of_row), row in rows.items():
        cells = *setting, *(_spread(row.get(name, [])) for name in contenders)
        queues.setdefault(cells, []).append(of_row)
    table = [[*cells[:2], ", ".join(found), *cells[2:]] for cells, found in queues.items()]
    return markdown_table([*_HEAD, *contenders], table, num_left=3)


def _spread(cells: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((min(cells), max(cells)))) if cells else ""
