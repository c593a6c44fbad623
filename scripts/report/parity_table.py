# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of the parity tests (ASYNCHZP_PARITY_LOG) into a Markdown table: one row
per configuration, with the number of shard sizes compared and the worst difference of each kind.
"""

import json

from scripts.report.records import markdown_table, print_table


def parity_table(lines: list[str]) -> str:
    """Markdown of all comparisons; `lines` are those that tests/support/parity.py writes."""
    return markdown([json.loads(line) for line in lines])


def markdown(comparisons: list[dict]) -> str:
    by_variant: dict[str, list[dict]] = {}
    for record in comparisons:
        by_variant.setdefault(f"{record['variant']} ({record['ranks']} ranks)", []).append(record)
    # fmt: off
    head = [
        "configuration", "sizes compared", "worst loss", "worst gradient norm", "allowed", "differ",
    ]
    # fmt: on
    rows = []
    for variant, records in by_variant.items():
        loss, norm = (
            max(record[key] for record in records) for key in ("loss_error", "grad_norm_error")
        )
        allowed = records[0]["tolerance"]
        bad = sum(
            not max(r["loss_error"], r["grad_norm_error"]) <= allowed or bool(r["faults"])
            for r in records
        )
        worst = [f"{loss:.1e}", f"{norm:.1e}", f"{allowed:.0e}"]
        rows.append([variant, str(len(records)), *worst, str(bad)])
    steps = " or ".join(str(number) for number in sorted({one["steps"] for one in comparisons}))
    return f"{markdown_table(head, rows)}\n{len(comparisons)} comparisons of {steps} steps each."


if __name__ == "__main__":
    print_table("parity_table", "tests run with ASYNCHZP_PARITY_LOG", markdown)
