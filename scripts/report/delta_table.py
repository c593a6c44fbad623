# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.weight_deltas into a table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table


def delta_table(lines: Sequence[dict]) -> str:
    """A row for each learning rate and number of steps: the part of the elements that changed, and
    the bytes of the delta, indices and values, beside those of all weights."""
    rows = [
        [
            f"{line['lr']:.0e}".replace("e-0", "e-"),
            str(line["steps"]),
            f"{100 * line['changed'] / line['numel']:.1f}",
            f"{line['delta_nbytes'] / 2**20:.2f}",
            f"{line['dense_nbytes'] / 2**20:.2f}",
            f"{100 * line['delta_nbytes'] / line['dense_nbytes']:.1f}",
        ]
        for line in lines
    ]
    header = ["learning rate", "steps", "% changed", "delta, MiB", "dense, MiB", "% of dense"]
    return markdown_table(header, rows)
