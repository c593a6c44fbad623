# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of bench_schedules.py, of one or more runs, into Markdown tables.

python scripts/report/schedule_table.py runs/schedules.jsonl
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

FLOORS = ("compute only", "communication only")


def tables(records: list[dict]) -> str:
    """One table per cluster; a cell is the median of the runs' medians, with min and max."""
    by_cluster: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cluster = record["nodes"], record["ranks_per_node"], record["profile"]["name"]
        cluster += (record["model"]["hidden"], record["model"]["block_ms"])
        by_cluster[cluster][record["contender"]].append(record)
    return "\n".join(_table(*cluster, runs) for cluster, runs in by_cluster.items())


def _table(
    nodes: int, ranks: int, network: str, hidden: int, block_ms: float, runs: dict[str, list[dict]]
) -> str:
    some = next(iter(runs.values()))
    medians = {
        name: statistics.median(record["median_ms"] for record in records)
        for name, records in runs.items()
    }
    floor_ms = max((medians[name] for name in FLOORS if name in medians), default=None)
    foreign = statistics.median(record["foreign_cpu"] for record in some)
    lines = [
        f"### {nodes} nodes x {ranks} ranks, {network}, {block_ms:g} ms a block, {hidden} wide",
        "",
        f"{len(some)} runs of {some[0]['repetitions']} repetitions of {some[0]['steps']} steps; "
        f"others used {foreign:.0%} of the machine.",
        "",
        "| contender | ms per step | min | max | x floor | sent by a node / P | ideal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, records in runs.items():
        times = [value for record in records for value in record["step_ms"]]
        ratio = f"{medians[name] / floor_ms:.3f}" if floor_ms and name not in FLOORS else ""
        volume, ideal = records[0]["volume"], records[0]["ideal_volume"]
        lines.append(
            f"| {name} | {medians[name]:.0f} | {min(times):.0f} | {max(times):.0f} | {ratio} "
            f"| {volume:.3f} | {ideal:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: schedule_table.py FILE    FILE: the --out of bench_schedules.py")
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(tables(records))


if __name__ == "__main__":
    main()
