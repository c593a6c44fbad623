# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of scripts.bench.bench_overlap into a Markdown table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

_HEAD = ["experts on", "schedule", "system", "step", "computation"]
_HEAD += ["all-to-alls", "exposed", "hidden", "others", "exposed", "hidden"]


def overlap_table(lines: Sequence[dict]) -> str:
    """A row for each step, in milliseconds; systems beside each other."""
    steps = [line for line in lines if line.get("kind") == "step"]
    order = list(dict.fromkeys((line["experts_on"], line["schedule"]) for line in steps))
    steps.sort(key=lambda line: order.index((line["experts_on"], line["schedule"])))
    rows = [
        [
            f"{line['experts_on']} ranks",
            line["schedule"],
            line["system"],
            f"{line['step']:.1f}",
            f"{line['computed']:.1f}",
            *_hidden(line, "all_to_all"),
            *_hidden(line, "others"),
        ]
        for line in steps
    ]
    return markdown_table(_HEAD, rows, num_left=3)


def _hidden(line: dict, name: str) -> list[str]:
    """Return how long they take, how much of that nothing is computed, and the rest's share."""
    whole, exposed = line[name], line[f"exposed_{name}"]
    return [f"{whole:.1f}", f"{exposed:.1f}", f"{1 - exposed / whole:.0%}"]
