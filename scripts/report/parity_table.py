# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of the parity tests (ASYNCHZP_PARITY_LOG) into a Markdown table: one row
per configuration, with the number of shard sizes compared and the worst difference of each kind.
"""

import json
import sys
from pathlib import Path


def parity_table(comparisons: list[dict]) -> str:
    """Markdown of all comparisons, as tests/support/parity.py writes them."""
    by_variant: dict[str, list[dict]] = {}
    for record in comparisons:
        by_variant.setdefault(f"{record['variant']} ({record['ranks']} ranks)", []).append(record)
    rows = [
        "| configuration | sizes | steps | worst loss | worst gradient norm | allowed | differ |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant, records in by_variant.items():
        loss, norm = (
            max(record[key] for record in records) for key in ("loss_error", "grad_norm_error")
        )
        allowed = records[0]["tolerance"]
        bad = sum(
            not max(r["loss_error"], r["grad_norm_error"]) <= allowed or bool(r["faults"])
            for r in records
        )
        rows.append(
            f"| {variant} | {len(records)} | {records[0]['steps']} | {loss:.1e} | {norm:.1e} "
            f"| {allowed:.0e} | {bad} |"
        )
    compared = [record for records in by_variant.values() for record in records]
    return "\n".join([*rows, "", f"{len(compared)} comparisons."])


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: parity_table.py FILE (JSON lines written under ASYNCHZP_PARITY_LOG)")
    print(parity_table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
