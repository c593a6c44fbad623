# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.restart_times into a table."""

from collections.abc import Sequence
from statistics import median

from scripts.report.records import markdown_table


def restart_table(lines: Sequence[dict]) -> str:
    """A row for each kind of checkpoint: medians over the deaths of a node, with their spread."""
    rows = []
    for kind in ("local", "shared"):
        those = [line for line in lines if line["checkpoints"] == kind]
        rows.append(
            [
                kind,
                str(those[0]["interval"]),
                str(len(those)),
                _spread([line["lost_steps"] for line in those]),
                _spread([line["dead_s"] for line in those]),
            ]
        )
    head = ["checkpoints", "saved every", "deaths", "steps made again"]
    return markdown_table([*head, "s from death to the next step"], rows)


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (f"{one:.0f}" for one in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
