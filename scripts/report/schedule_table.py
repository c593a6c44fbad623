# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of bench_schedules.py, of one or more runs, into Markdown tables.

python -m scripts.report.schedule_table runs/schedules.jsonl
"""

import statistics
from collections import defaultdict

from scripts.report.records import markdown_table, print_table

FLOORS = COMPUTE, COMMUNICATION = "compute only", "communication only"


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
    ]
    head = ["contender", "ms per step", "min", "max", "x floor", "sent by a node / P", "ideal"]
    rows = []
    for name, records in runs.items():
        times = [value for record in records for value in record["step_ms"]]
        ratio = f"{medians[name] / floor_ms:.3f}" if floor_ms and name not in FLOORS else ""
        volume, ideal = records[0]["volume"], records[0]["ideal_volume"]
        whole = [f"{value:.0f}" for value in (medians[name], min(times), max(times))]
        rows.append([name, *whole, ratio, f"{volume:.3f}", f"{ideal:.3f}"])
    return "\n".join([*lines, markdown_table(head, rows, num_left=len(head))])


if __name__ == "__main__":
    print_table("schedule_table", "scripts.bench.bench_schedules", tables)
