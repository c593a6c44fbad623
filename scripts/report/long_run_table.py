# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.long_run into a table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table


def long_run_table(lines: Sequence[dict]) -> str:
    """A row for each start: its steps, and what rank 0 had at the first sample and at the last."""
    rows = []
    for start in sorted({line["start"] for line in lines}):
        samples = [line for line in lines if line["start"] == start and line.get("rank") == 0]
        (folder,) = (line for line in lines if line["start"] == start and "entries" in line)
        first, last = samples[0], samples[-1]
        rows.append(
            [
                f"{first['step']} to {last['step']}",
                _change(first, last, "live_nbytes", 2**10),
                _change(first, last, "resident_nbytes", 2**20),
                _change(first, last, "files"),
                _change(first, last, "threads"),
                f"{folder['entries'] / folder['checkpoints']:.1f}",
                f"{last['loss']:.3f}",
            ]
        )
    header = ["steps", "live tensors, KiB", "resident, MiB", "open files", "threads"]
    return markdown_table([*header, "files per checkpoint", "loss"], rows)


def _change(first: dict, last: dict, name: str, unit: int = 1) -> str:
    if first[name] is None:
        return "?"
    digits = 1 if unit > 1 else 0
    values = [f"{sample[name] / unit:.{digits}f}" for sample in (first, last)]
    return " to ".join(dict.fromkeys(values))
