# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of scripts.bench.bench_offload into a Markdown table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table


def offload_table(lines: Sequence[dict]) -> str:
    """A row for each fraction, a column for each link and number of micro-batches: tokens a second
    of the run whose states are all on the device."""
    kinds = list(dict.fromkeys((line["link"], line["micro_batches"]) for line in lines))
    speeds = {
        (line["fraction"], line["link"], line["micro_batches"]): line["tokens_per_s"]
        for line in lines
    }
    on_device = {line["fraction"]: line["on_device"] for line in lines}
    head = ["on the host", "bytes of states on the device"]
    head += [f"link {link:g}, micro-batches {count}" for link, count in kinds]
    rows = [
        [f"{fraction:g}", f"{part:.0%}"]
        + [f"{speeds[fraction, *kind] / speeds[0, *kind]:.1%}" for kind in kinds]
        for fraction, part in on_device.items()
    ]
    return markdown_table(head, rows, num_left=1)
