# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of compare.py into Markdown: for each cluster and network the calibration, a
table, and a verdict about AsyncHZP.

    python -m scripts.report.compare_table runs/compare/records.jsonl
"""

from collections.abc import Iterable

from megatron_asynchzp.testbed.cpu_usage import FOREIGN_LIMIT
from scripts.report.compare_rows import Comparison, Row, ahead, comparisons, orders, sharded_peers
from scripts.report.records import machine_line, markdown_table, print_table

# fmt: off
_HEAD = [
    "contender", "kind", "step ms", "min", "max", "tokens/s", "x best ND", "waits ms",
    "MB off node", "state MB", "peak MB", "loss",
]
# fmt: on
NOTES = """\
How to read it. All contenders train the same GPT in fp32 with gradients in fp32, from the same
weights, over the same global batches, with Adam and clipping; a row whose losses differ from DDP's
by more than 1e-5 in any step is red and has no times. All use the same backend: one operation of a
group after the other, rings of the least volume. Computing a layer is time that passes, the same
sum for all, divided by tensor-parallel ranks and spread over stages; what is not emulated (small
real arithmetic, the optimizer, Python; four ranks on two cores) is in *compute only*.

- *step ms*: median, with extremes, of all timed steps, from the begin of one to that of the next.
- *x best ND*: the step of the fastest stock configuration over this one's.
- *waits ms*: for which the main thread of the fullest rank waited for the network, per step:
  exposed communication, for pipelines the bubble too.
- *MB off node*: sent by the fullest node to others, per step. *state*: all tensors between two
  steps, fixed buffers included; *peak*: their most within a step; fullest rank.
- Megatron-FSDP, FSDP2: each layer a unit, the next one gathered ahead. A row marked * had an
  operation on a side stream that the host had to wait for, and would hide more on an accelerator.
- The first of ours is the default; (P,G,O) are the ranks that share parameters, gradients, states.
"""


def markdown(records: Iterable[dict]) -> str:
    """The whole report of a run."""
    records = list(records)
    parts = [_section(comparison) for comparison in comparisons(records)]
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
    lines.append(markdown_table(_HEAD, rows, num_left=2))
    notes = dict.fromkeys(row.note for row in comparison.rows if row.note)
    lines += [*verdict(comparison), *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def setting(comparison: Comparison) -> str:
    """The network and the work that were the same for all."""
    profile, work = comparison.profile, comparison.workload
    return (
        f"{profile['inter_gbit']:g} Gbit/s and {profile['inter_latency_us']:g} us between nodes, "
        f"{profile['intra_gbit']:g} Gbit/s and {profile['intra_latency_us']:g} us inside; "
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
    name = f"**{row.name}**" if row.family == "AsyncHZP" else row.name
    if row.reason:
        return [name, row.family, f"not run: {row.reason}", *[""] * (len(_HEAD) - 3)]
    if row.is_red:
        parts = ["RED: wrong losses", *[""] * 5]
    else:
        times = [f"{value:.0f}" for value in (row.median_ms, min(row.step_ms), max(row.step_ms))]
        speed = f"{ahead(best_nd, row):.2f}" if best_nd is not None else ""
        parts = [*times, f"{row.tokens_per_s:.0f}", speed, _number(row.exposed_ms, 0)]
    mark = " *" if row.host_waits else ""
    sizes = [_number(value, 2) for value in (row.node_mb, row.state_mb, row.peak_mb)]
    return [name + mark, row.family, *parts, *sizes, f"{row.loss:.6f}"]


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


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
