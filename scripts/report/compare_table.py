# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of compare.py into Markdown: for each cluster and network the calibration, a
table, and a verdict about AsyncHZP.

    python -m scripts.report.compare_table runs/compare/records.jsonl
"""

from collections.abc import Iterable, Sequence

from scripts.report.compare_rows import Comparison, Row, ahead, comparisons, orders, sharded_peers
from scripts.report.records import machine_line, markdown_table, print_table
from scripts.testbed.contenders.side_by_side import OURS
from scripts.testbed.cpu_usage import FOREIGN_LIMIT

# fmt: off
HEAD = [
    "contender", "kind", "step ms", "min", "max", "x best ND", "without network", "network's part",
    "waits ms", "Adam ms", "MB off node", "MB at rest", "MB at peak", "loss",
]
# fmt: on
NOTES = """\
How to read it. All contenders train the same GPT in fp32 with gradients in fp32, from the same
weights, over the same global batches, with the same fused Adam and clipping; a row whose losses
differ from DDP's by more than 1e-5 in any step is red and has no times. All use the same backend:
one operation of a group after the other, rings of the least volume. Computing a layer is time that
passes, the same sum for all, divided by tensor-parallel ranks and spread over stages; what is not
emulated (small real arithmetic, the optimizer, Python; four ranks on two cores) is in *compute
only*.

- *step ms*: median, with extremes, of all timed steps, from the begin of one to that of the next.
- *x best ND*: the step of the fastest stock configuration over this one's.
- *without network*: the step of the same contender where no network is modelled: computing, the
  optimizer and the host's own work. *network's part*: the rest of the step.
- *waits ms*: for which the main thread of the fullest rank waited for others, per step: exposed
  communication, for pipelines the bubble too. *Adam ms*: in the optimizer, per step.
- *MB off node*: sent by the fullest node to others, per step. *MB at rest*: all tensors between two
  steps, fixed buffers included; *MB at peak*: their most within a step; fullest rank.
- Megatron-FSDP, FSDP2: each layer a unit, the next one gathered ahead. A row marked * had an
  operation on a side stream that the host had to wait for, and would hide more on an accelerator.
- The first of ours is the default; (P,G,O) are the ranks that share parameters, gradients, states.
"""


def markdown(records: Iterable[dict]) -> str:
    """The whole report of a run."""
    records = list(records)
    found = comparisons(records)
    parts = [_section(comparison) for comparison in found]
    for bare in found:
        if not bare.has_network:
            parts.append(networks_table(bare, found))
    machine = next((record for record in records if record["kind"] == "machine"), None)
    if machine is not None:
        parts.append(machine_line(machine))
    return "\n".join([*parts, NOTES])


def _section(comparison: Comparison) -> str:
    nodes, ranks = comparison.nodes, comparison.ranks_per_node
    lines = [f"### {nodes} nodes x {ranks} ranks, {comparison.profile['name']}", ""]
    lines += [setting(comparison), ""]
    if comparison.calibration is not None:
        lines += [*calibration_lines(comparison.calibration), ""]
    rows = [cells(row, comparison.best_nd) for row in comparison.rows]
    lines.append(markdown_table(HEAD, rows, num_left=2))
    notes = dict.fromkeys(row.note for row in comparison.rows if row.note)
    lines += [*verdict(comparison), *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


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


def calibration_lines(it: dict) -> list[str]:
    """The calibration, as a list."""
    return [
        f"- Compute only {it['compute_ms']:.0f} ms a step, of which {it['emulated_ms']:.0f} ms "
        f"are emulated. Communication only {it['flat_ms']:.0f} ms with everything sharded over "
        f"all ranks, {it['hierarchical_ms']:.0f} ms with parameters and gradients in a node "
        "(real arithmetic included).",
        f"- An all-gather of 1 MB per rank takes {it['probe_ms']:.1f} ms; the model of the "
        f"network gives {it['probe_model_ms']:.1f} ms. Others used {it['idle_foreign']:.0%} of "
        f"the machine before, {it['foreign']:.0%} at most while calibrating.",
    ]


def cells(row: Row, best_nd: Row | None) -> list[str]:
    """One line of the table; a row that is red or was not measured shows no speed."""
    name = f"**{row.name}**" if row.family == OURS else row.name
    if row.reason:
        return [name, row.family, f"not run: {row.reason}", *[""] * (len(HEAD) - 3)]
    if row.is_red:
        parts = ["RED: wrong losses", *[""] * 7]
    else:
        times = [f"{value:.0f}" for value in (row.median_ms, min(row.step_ms), max(row.step_ms))]
        speed = f"{ahead(best_nd, row):.2f}" if best_nd is not None else ""
        network = [_number(value, 0, "") for value in (row.bare_ms, row.network_ms)]
        host = [_number(row.exposed_ms, 0), _number(row.optimizer_ms, 1)]
        parts = [*times, speed, *network, *host]
    mark = " *" if row.host_waits else ""
    sizes = [_number(value, 2) for value in (row.node_mb, row.state_mb, row.peak_mb)]
    return [name + mark, row.family, *parts, *sizes, f"{row.loss:.6f}"]


def _number(value: float | None, digits: int, unknown: str = "?") -> str:
    return unknown if value is None else f"{value:.{digits}f}"


def beaten_line(comparison: Comparison) -> str:
    """Who is faster than ours, by name, with the memory that it takes; empty where ours is not."""
    if (ours := comparison.ours) is None:
        return ""
    faster = [_beside_ours(row, ours) for row in comparison.faster_than(ours)]
    if not faster:
        return f"Nothing is faster than {ours.name}, the default."
    return f"Faster than {ours.name}, the default: {'; '.join(faster)}."


def _beside_ours(row: Row, ours: Row) -> str:
    text = f"{row.name} by {ours.median_ms - row.median_ms:.0f} ms"
    if row.peak_mb is None or ours.peak_mb is None:
        return text
    more = row.peak_mb / ours.peak_mb - 1
    return f"{text}, {abs(more):.0%} {'more' if more >= 0 else 'less'} memory at the peak"


def behind_lines(comparison: Comparison) -> list[str]:
    """Of those that ours is ahead of and that were measured without a network too: how much of the
    distance is the network's."""
    ours = comparison.ours
    if ours is None or ours.bare_ms is None:
        return []
    lines = []
    for row in comparison.rows:
        if row.bare_ms is not None and row.median_ms > ours.median_ms:
            behind, host = round(row.median_ms - ours.median_ms), round(row.bare_ms - ours.bare_ms)
            lines.append(
                f"- {row.name} is {behind} ms behind {ours.name}: {host} ms without a network, and "
                f"{behind - host} ms in the network's part."
            )
    return lines


def networks_table(bare: Comparison, found: Sequence[Comparison]) -> str:
    """Every row of `bare`, which has no network, beside its step and the network's part on each
    network of the same cluster among `found`, and its memory there, on the first of them."""
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
            line = [f"**{row.name}**" if row.family == OURS else row.name, _step(row)]
            for one in networks:
                there = one.row(row.name)
                part = None if there is None else there.network_ms
                line += ["" if there is None else _step(there), _number(part, 0, "")]
            memory = networks[0].row(row.name) or row if networks else row
            line += [_number(value, 1) for value in (memory.state_mb, memory.peak_mb)]
            table.append(line)
    return markdown_table([*head, "MB at rest", "MB at peak"], table)


def _step(row: Row) -> str:
    """Its median, with a warning where others used the machine in every run of it."""
    return f"{row.median_ms:.0f}{' (disturbed)' * (row.foreign > FOREIGN_LIMIT)}"


def verdict(comparison: Comparison) -> list[str]:
    """The verdict on ours, line by line."""
    ours, best = comparison.ours, comparison.best_nd
    if ours is None:
        return ["AsyncHZP threaded was not measured: no verdict."]
    lines = []
    if best is not None:
        lines.append(
            f"- {ours.name} is {ahead(best, ours):.2f} x as fast as {best.name}, the best "
            "stock ND configuration."
        )
    if (optimizer := comparison.row("distributed optimizer")) is not None:
        speed = ahead(optimizer, ours)
        lines.append(f"- It is {speed:.2f} x as fast as the distributed optimizer.")
    if ours.state_mb is not None:
        lines += [
            f"- It is {ahead(peer, ours):.2f} x as fast as {peer.name}, and holds "
            f"{ours.state_mb / peer.state_mb:.2f} x as much between two steps."
            for peer in sharded_peers(comparison)
        ]
    if len(found := orders(comparison)) > 1:
        same = len(set(found)) == 1
        lines.append(
            f"- The first three of {len(found)} repetitions: "
            + (
                "always " + ", ".join(found[0])
                if same
                else "; ".join(", ".join(order) for order in found)
            )
            + "."
        )
    lines += [f"- {beaten_line(comparison)}", *behind_lines(comparison)]
    busy = [row.name for row in comparison.rows if row.foreign > FOREIGN_LIMIT]
    lines.append(
        f"- Others used more than {FOREIGN_LIMIT:.0%} of the machine in no run shown."
        if not busy
        else f"- Others used more than {FOREIGN_LIMIT:.0%} of the machine in "
        f"every run of: {', '.join(busy)}. These times are not to be quoted."
    )
    return lines


if __name__ == "__main__":
    print_table("compare_table", "scripts.bench.compare", markdown)
