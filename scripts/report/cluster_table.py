# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of count_clusters.py into a table: what a rank of every row of
scripts/train/rows.toml holds."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

GIB = 2**30
_COLUMNS = ("params", "grads", "main, moments", "states", "in flight", "together")


def table(lines: Sequence[dict]) -> str:
    """One row for the rows of the paper that are the same run, of the fullest pipeline stage."""
    same: dict[tuple, list[dict]] = {}
    for line in lines:
        same.setdefault((line["row"].rsplit("-", 1)[-1] == "nd", *_cells(line)), []).append(line)
    head, rows = ["row", "parameters", "ranks", *_COLUMNS], []
    for (_, *cells), of_row in same.items():
        ranks = sorted({line["ranks"] for line in of_row})
        text = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
        names = ", ".join(line["row"] for line in of_row)
        rows.append([names, cells[0], text, *cells[1:]])
    return markdown_table(head, rows, len(head))


def _cells(line: dict) -> tuple[str, ...]:
    stage = max(line["stages"], key=lambda one: sum((one["allocated"] | one["in_flight"]).values()))
    params, grads, *optimizer = stage["allocated"].values()
    in_flight = sum(stage["in_flight"].values())
    states = params + grads + sum(optimizer)
    sizes = (params, grads, sum(optimizer), states, in_flight, states + in_flight)
    text = [f"{nbytes / GIB:.2f}" if nbytes else "" for nbytes in sizes]
    return f"{line['parameters'] / 1e9:.2f}B", *text


def cell(line: dict, column: str) -> str:
    """One cell of the row that `line` is, by the name of its column."""
    return dict(zip(("parameters", *_COLUMNS), _cells(line), strict=True))[column]
