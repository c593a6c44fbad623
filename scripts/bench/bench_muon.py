# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What Muon costs beside Adam: milliseconds and bytes between nodes of a step, of AsyncHZP and of
stock Megatron, on 2 x 2 ranks of an emulated cluster, in turns. Writes JSON lines.

    python -m scripts.bench.bench_muon --out runs/muon.jsonl
    python -m scripts.bench.bench_muon --repetitions 1 --steps 3     # a minute or two

Ends with status 1, and without records of that turn, where systems with one optimizer train apart.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from scripts.bench.compare_measure import RUN_LIMIT_S, measure, prepare_environment
from scripts.report.records import append
from scripts.testbed.contenders.side_by_side import Contender
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.differences import BF16_LOSSES, worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import DISTRIBUTED_OPTIMIZER, size_flags
from scripts.testbed.profile import PROFILES, named_profile
from scripts.testbed.ranks import Cluster

NODES, RANKS_PER_NODE = 2, 2
# Models in bf16: in fp32 Megatron 0.19 ends with an AttributeError where Muon and its distributed
# optimizer come together. The iteration in fp32: a CPU emulates bf16, its default, more slowly.
_MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
_OURS = ("--bf16", *size_flags((2, 2, 4)))
_DDP = ("--bf16", "--overlap-grad-reduce")
_DISTRIBUTED = ("--bf16", *DISTRIBUTED_OPTIMIZER)
_OUR_NAME, _DDP_NAME = "AsyncHZP (2,2,4)", "stock DDP"
CONTENDERS = [
    Contender(_OUR_NAME, "Adam", flags=_OURS),
    Contender(_OUR_NAME, "Muon", flags=(*_OURS, *_MUON)),
    Contender(_DDP_NAME, "Adam", flags=_DDP),
    Contender(_DDP_NAME, "Muon", flags=(*_DDP, *_MUON)),
    Contender("stock distributed optimizer", "Adam", flags=_DISTRIBUTED),
    Contender("stock distributed optimizer", "Muon", flags=(*_DISTRIBUTED, *_MUON)),
]


def main() -> None:
    args = parse_args(sys.argv[1:])
    prepare_environment()
    cluster = Cluster(NODES, RANKS_PER_NODE, named_profile(args.profile))
    workload = Workload(layers=args.layers, hidden=args.hidden, steps=args.steps)
    common = {"bench": "muon", "profile": args.profile, "workload": asdict(workload)}
    log = args.out.with_suffix(".log")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    append(args.out, machine_record())
    for repetition in range(args.repetitions):
        records = []
        for one in CONTENDERS:
            found = measure(cluster, workload, one, RUN_LIMIT_S, log)
            record = common | {"system": one.name, "optimizer": one.family} | found
            records.append(record | {"repetition": repetition})
            Console(stderr=True).print(_line(record), highlight=False, soft_wrap=True)
        check(records)
        append(args.out, *records)


def check(records: Sequence[dict]) -> None:
    """End with a status where the losses of a system are not those of the first one that trained
    with the same optimizer."""
    first: dict[str, dict] = {}
    for record in (one for one in records if "reason" not in one):
        other = first.setdefault(record["optimizer"], record)
        if (apart := worst_difference(record["losses"], other["losses"])) > BF16_LOSSES:
            sys.exit(
                f"bench_muon: {record['system']}, {record['optimizer']}: losses are {apart:.1e} "
                f"from those of {other['system']}, more than {BF16_LOSSES:g}"
            )


def _line(record: dict) -> str:
    name = f"{record['system']}, {record['optimizer']}"
    if "reason" in record:
        return f"{name}: {record['reason']}"
    return f"{name}: {median(record['step_ms']):.0f} ms, {record['node_nbytes'] / 1e6:.2f} MB"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", default="slow-between-nodes", choices=sorted(PROFILES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/muon.jsonl"), metavar="FILE")
    args = parser.parse_args(argv)
    for name in ("layers", "hidden", "steps", "repetitions"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


if __name__ == "__main__":
    main()
