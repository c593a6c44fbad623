# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of scripts.bench.grad_wire into Markdown tables: where runs end whose gradients
travel in fp32 or in bf16, and how long a step takes.
"""

import statistics
from collections.abc import Sequence

from scripts.report.records import markdown_table, print_table
from scripts.testbed.cpu_usage import FOREIGN_LIMIT


def wire_table(lines: Sequence[dict]) -> str:
    """A row for each run, then one for each wire."""
    ends = [
        [line["wire"], str(line["seed"]), str(line["steps"]), f"{line['last']:.5f}"]
        for line in lines
        if line["kind"] == "loss"
    ]
    steps = [
        [line["wire"], _step(line), f"{line['node_nbytes'] / 1e6:.2f}"]
        for line in lines
        if line["kind"] == "time"
    ]
    tables = []
    if ends:
        head = ["gradients travel in", "seed", "steps", "mean loss of the last ones"]
        tables.append(markdown_table(head, ends))
    if steps:
        head = ["gradients travel in", "ms of a step", "MB that leave a node in a step"]
        tables.append(markdown_table(head, steps))
    return "\n".join(tables)


def _step(line: dict) -> str:
    warning = " (disturbed)" if line["foreign"] > FOREIGN_LIMIT else ""
    times = line["step_ms"]
    spread = f"({min(times):.0f} to {max(times):.0f})"
    return f"{statistics.median(times):.0f} {spread}{warning}"


def wire_ratio(lines: Sequence[dict]) -> float:
    """How many times as fast a step is with bf16: medians over the runs.

    Raises LookupError without times.
    """
    timed = {line["wire"]: line for line in lines if line.get("kind") == "time"}
    fp32, bf16 = (statistics.median(timed[wire]["step_ms"]) for wire in ("fp32", "bf16"))
    return fp32 / bf16


if __name__ == "__main__":
    print_table("wire_table", "scripts.bench.grad_wire", wire_table)
