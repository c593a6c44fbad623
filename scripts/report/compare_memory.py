# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results/compare.md: the memory of a row, what a network was calibrated to, and
the rows of one network. The pictures show all rows of all networks.
"""

from collections.abc import Sequence

from scripts.report.compare_rows import Comparison, Row
from scripts.report.records import markdown_table
from scripts.testbed.contenders.side_by_side import OURS
from scripts.testbed.cpu_usage import FOREIGN_LIMIT


def state_of(row: Row) -> float:
    return float("inf") if row.state_mb is None else row.state_mb


def peak_of(row: Row) -> float:
    return float("inf") if row.peak_mb is None else row.peak_mb


def name_of(row: Row) -> str:
    """Bold where it is ours, with a warning where others used the machine in every run of it."""
    name = f"**{row.name}**" if row.family == OURS else row.name
    return f"{name} (disturbed)" if row.foreign > FOREIGN_LIMIT else name


def calibration_table(found: Sequence[Comparison]) -> str:
    """How long computing and communicating alone take on each network."""
    head = ["network", "Gbit/s between nodes, inside", "computing alone, ms"]
    head += ["communicating alone, ms: flat", "hierarchical"]
    rows = []
    for one in found:
        if (it := one.calibration) is not None:
            speeds = (one.profile[key] for key in ("inter_gbit", "intra_gbit"))
            gbit = ", ".join(f"{speed:g}" for speed in speeds) if one.has_network else "none"
            times = [f"{it[key]:.0f}" for key in ("compute_ms", "flat_ms", "hierarchical_ms")]
            rows.append([one.profile["name"], gbit, *times])
    return markdown_table(head, rows)


def measured_table(comparison: Comparison) -> str:
    """Every row with times, the fastest first."""
    head = ["contender", "step ms", "min", "max", "MB off node", "MB at rest", "MB at peak"]
    rows = [
        [
            name_of(row),
            *(f"{ms:.0f}" for ms in (row.median_ms, min(row.step_ms), max(row.step_ms))),
            *("" if mb is None else f"{mb:.1f}" for mb in (row.node_mb, row.state_mb, row.peak_mb)),
        ]
        for row in comparison.rows
        if row.is_timed
    ]
    return markdown_table(head, rows)
