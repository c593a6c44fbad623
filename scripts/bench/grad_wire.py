# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that travel in bf16 (`--grad-reduce-in-bf16`) beside fp32: where a training run ends,
and how long a step takes on a modelled network on which gradients are the bottleneck.

    python -m scripts.bench.grad_wire --out grad_wire.jsonl
    python -m scripts.bench.grad_wire --repetitions 0       # the losses alone
    python -m scripts.bench.grad_wire --train-steps 0       # the times alone

Both train through Megatron's `pretrain()` in bf16. Losses: 4 ranks, three runs: two seeds with fp32
gradients, the first of them with bf16 too. Times: 2 nodes of 2 ranks, sizes (2, 4, 4), two
micro-batches, both wires in turns. Ends with status 1 where the bf16 run is further from its fp32
run than the other seed is, or where a step is not faster by the factor that is asked for; on a
machine that others use too no time is a failure. And, without a record, where timed runs of the two
wires have other losses.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.bench.compare_measure import RUN_LIMIT_S, measure, prepare_environment
from scripts.report.records import append
from scripts.report.wire_table import wire_ratio
from scripts.testbed.contenders.side_by_side import Contender
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.cpu_usage import FOREIGN_LIMIT
from scripts.testbed.differences import BF16_LOSSES, worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.profile import named_profile
from scripts.testbed.ranks import Cluster, run_ranks

PROFILE = "slower-between-nodes"
FASTER = 1.15
LAST = 20  # steps whose mean loss is where a run ends
_NODES, _RANKS = 2, 2
_SIZES = (_RANKS, _NODES * _RANKS, _NODES * _RANKS)
_WIRES = {"fp32": (), "bf16": ("--grad-reduce-in-bf16",)}
_SEEDS = (1234, 4321)
_LOG = Path("runs", "grad_wire.log")
# Computing is short beside the network, so that what travels decides.
_WORKLOAD = Workload(layer_ms=2.0, warm_up=2, steps=6)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    prepare_environment()
    lines = [machine_record()]
    if args.train_steps:
        lines += losses(args.train_steps)
    if args.repetitions:
        lines += times(args.repetitions)
    if args.out:
        append(args.out, *lines)
    found = verdicts(lines)
    for is_met, text in found:
        print(f"{'met' if is_met else 'NOT MET'}: {text}")
    return 0 if all(is_met for is_met, _ in found) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--train-steps", type=int, default=500, help="of each run for the losses")
    parser.add_argument("--repetitions", type=int, default=3, help="timed runs of each wire")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args(argv)
    if args.train_steps and args.train_steps < 2 * LAST:
        parser.error(f"--train-steps must be 0, or at least {2 * LAST}")
    if args.repetitions < 0:
        parser.error("--repetitions must not be negative")
    return args


# ---- where training ends


def losses(steps: int) -> list[dict]:
    """One record per run: the mean loss of its last steps, and of its first ones."""
    runs = [("fp32", _SEEDS[0]), ("bf16", _SEEDS[0]), ("fp32", _SEEDS[1])]
    ends = run_ranks(_train, 4, steps, runs, timeout_s=60 + 6.0 * steps)[0]
    return [
        {"kind": "loss", "wire": wire, "seed": seed, "steps": steps, "first": first, "last": last}
        for (wire, seed), (first, last) in zip(runs, ends, strict=True)
    ]


def _train(steps: int, runs: list[tuple[str, int]]) -> list[tuple[float, float]]:
    """Mean losses of the first and the last steps of each run. On every rank."""
    from scripts.testbed.megatron_runs import gpt_args, run_pretrain

    ends = []
    for wire, seed in runs:
        flags = ["--train-iters", str(steps), "--lr-decay-iters", str(steps), "--seed", str(seed)]
        more = ["--bf16", "--lr", "1e-3", "--min-lr", "1e-4", *size_flags((1, 2, 4))]
        record = run_pretrain(gpt_args(*flags, *more, *_WIRES[wire]))
        found = [loss for loss in record.losses if loss is not None]
        ends.append((statistics.fmean(found[:LAST]), statistics.fmean(found[-LAST:])))
    return ends


# ---- how long a step takes


def times(repetitions: int) -> list[dict]:
    """One record per wire; the runs of both alternate."""
    _LOG.parent.mkdir(exist_ok=True)
    profile = replace(named_profile(PROFILE), ranks_per_node=_RANKS)
    cluster = Cluster(_NODES, _RANKS, profile)
    micro_batch = _WORKLOAD.samples // cluster.num_ranks // 2
    records = {wire: _empty_record(wire) for wire in _WIRES}
    for _ in range(repetitions):
        found: dict[str, list[float]] = {}
        for wire, flags in _WIRES.items():
            one = Contender(wire, "", micro_batch, ("--bf16", *size_flags(_SIZES), *flags))
            run = measure(cluster, _WORKLOAD, one, RUN_LIMIT_S, _LOG)
            if "reason" in run:
                sys.exit(f"grad_wire: {wire}: {run['reason']}; {_LOG} has more")
            found[wire] = run["losses"]
            records[wire]["step_ms"] += [statistics.median(run["step_ms"])]
            records[wire]["foreign"] = max(records[wire]["foreign"], run["foreign"])
            records[wire]["node_nbytes"] = run["node_nbytes"]
        if (apart := worst_difference(found["bf16"], found["fp32"])) > BF16_LOSSES:
            sys.exit(
                f"grad_wire: timed runs: losses with bf16 are {apart:.1e} from those with fp32, "
                f"more than {BF16_LOSSES:g}"
            )
    return list(records.values())


def _empty_record(wire: str) -> dict:
    workload = {"layers": _WORKLOAD.layers, "hidden": _WORKLOAD.hidden}
    common = {"kind": "time", "wire": wire, "profile": PROFILE, "sizes": list(_SIZES)}
    return common | workload | {"step_ms": [], "node_nbytes": 0.0, "foreign": 0.0}


# ---- what follows from the records


def verdicts(lines: Sequence[dict]) -> list[tuple[bool, str]]:
    """What must hold of the records, and whether it does."""
    found: list[tuple[bool, str]] = []
    ends = {(line["wire"], line["seed"]): line for line in lines if line.get("kind") == "loss"}
    if ends:
        own, other, rounded = (
            ends[key]["last"]
            for key in (("fp32", _SEEDS[0]), ("fp32", _SEEDS[1]), ("bf16", _SEEDS[0]))
        )
        spread, apart = abs(other - own), abs(rounded - own)
        text = f"bf16 ends {apart:.1e} from fp32 ({own:.4f}), two seeds end {spread:.1e} apart"
        found.append((apart <= spread < ends["fp32", _SEEDS[0]]["first"] - own, text))
    timed = {line["wire"]: line for line in lines if line.get("kind") == "time"}
    if timed:
        factor = wire_ratio(lines)
        is_busy = max(line["foreign"] for line in timed.values()) > FOREIGN_LIMIT
        text = f"a step with bf16 is {factor:.2f} times as fast as with fp32"
        found.append((factor >= FASTER or is_busy, text + ", on a busy machine" * is_busy))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
