# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of compare.py into Markdown: the published table and one of each network."""

from collections.abc import Iterable, Sequence

from scripts.report.compare_rows import Comparison, Row, comparisons
from scripts.report.records import markdown_table
from scripts.testbed.contenders.side_by_side import OURS
from scripts.testbed.cpu_usage import FOREIGN_LIMIT


def markdown(records: Iterable[dict]) -> str:
    """The whole report of a run. A row with wrong losses, or that did not run, has no times."""
    found = comparisons(records)
    parts = [_section(one) for one in found]
    parts += [networks_table(bare, found) for bare in found if not bare.has_network]
    return "\n".join(parts)


def _section(comparison: Comparison) -> str:
    name = f"{comparison.nodes} nodes x {comparison.ranks_per_node} ranks, "
    lines = [f"### {name}{comparison.profile['name']}", "", setting(comparison), ""]
    without = [
        f"- {row.name}: {row.reason or f'RED: wrong losses, the last {row.loss:.6f}'}"
        for row in comparison.rows
        if not row.is_timed
    ]
    return "\n".join([*lines, measured_table(comparison), *without, ""])


def setting(comparison: Comparison) -> str:
    """The network and the work that were the same for all."""
    profile, work = comparison.profile, comparison.workload
    network = (
        f"{profile['inter_gbit']:g} Gbit/s and {profile['inter_latency_us']:g} us between nodes, "
        f"{profile['intra_gbit']:g} Gbit/s and {profile['intra_latency_us']:g} us inside"
    )
    return (
        f"{network if comparison.has_network else 'no network is modelled'}; "
        f"{work['layers']} layers of hidden size {work['hidden']}, "
        f"{work['samples']} samples of {work['seq_length']} tokens a step, "
        f"{work['layer_ms']:g} ms forward for a sample and layer."
    )


def networks_table(bare: Comparison, found: Sequence[Comparison]) -> str:
    """Write a row of each contender: step, network's part and memory on each network."""
    cluster = bare.nodes, bare.ranks_per_node
    networks = [
        one for one in found if one.has_network and (one.nodes, one.ranks_per_node) == cluster
    ]
    head = ["contender", "without network, ms"]
    for one in networks:
        head += [f"{one.profile['name']}, ms", "network's part"]
    table = []
    for row in bare.rows:
        if row.is_timed:
            line = [_bold(row), _step(row)]
            for one in networks:
                there = one.row(row.name)
                part = None if there is None else there.network_ms
                line += ["" if there is None else _step(there), _number(part, 0)]
            memory = networks[0].row(row.name) or row if networks else row
            line += [_number(value, 1) for value in (memory.state_mb, memory.peak_mb)]
            table.append(line)
    return markdown_table([*head, "MB between steps", "MB at peak"], table)


def state_of(row: Row) -> float:
    return float("inf") if row.state_mb is None else row.state_mb


def peak_of(row: Row) -> float:
    return float("inf") if row.peak_mb is None else row.peak_mb


def name_of(row: Row) -> str:
    """Bold where it is ours, with a warning where others used the machine in every run of it."""
    return f"{_bold(row)}{' (disturbed)' * (row.foreign > FOREIGN_LIMIT)}"


def _bold(row: Row) -> str:
    return f"**{row.name}**" if row.family == OURS else row.name


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def measured_table(comparison: Comparison) -> str:
    """Every row with times, the fastest first."""
    head = ["contender", "step ms", "min", "max", "MB off node", "MB between steps", "MB at peak"]
    rows = [
        [
            name_of(row),
            *(f"{ms:.0f}" for ms in (row.median_ms, min(row.step_ms), max(row.step_ms))),
            *(_number(mb, 1) for mb in (row.node_mb, row.state_mb, row.peak_mb)),
        ]
        for row in comparison.rows
        if row.is_timed
    ]
    return markdown_table(head, rows)


def _step(row: Row) -> str:
    """Its median, with a warning where others used the machine in every run of it."""
    return f"{row.median_ms:.0f}{' (disturbed)' * (row.foreign > FOREIGN_LIMIT)}"
