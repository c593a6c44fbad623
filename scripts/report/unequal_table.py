# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.unequal_lengths into a table."""

from collections.abc import Sequence
from statistics import median

from scripts.report.records import markdown_table


def unequal_table(lines: Sequence[dict]) -> str:
    """A row for each way: a step's median with its spread, over that of the busiest group alone,
    and tokens that count per second, over those of the padded way."""
    steps = {line["way"]: [1e3 * one / line["steps"] for one in line["seconds"]] for line in lines}
    floor, slowest = median(steps["alone"]), median(steps["padded"])
    rows = []
    for way, each in steps.items():
        spread = f"{median(each):.0f} ({min(each):.0f} to {max(each):.0f})"
        rate = "" if way == "alone" else f"{slowest / median(each):.2f}"
        rows.append([_NAMES[way], spread, f"{median(each) / floor:.3f}", rate])
    return markdown_table(["", "ms of a step", "over the floor", "tokens per second"], rows)


_NAMES = {
    "alone": "the busiest group's computation alone (the floor)",
    "padded": "padded to the longest",
    "packed, equal": "packed, all ranks as many micro-batches",
    "packed, unequal": "packed, each group as many as it needs",
}
