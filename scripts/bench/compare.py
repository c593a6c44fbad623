# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one GPT by Megatron's parallelisms, by other sharded systems and by AsyncHZP.

All run on an emulated cluster. It writes JSON lines, a table and a picture.

    python -m scripts.bench.compare --out runs/compare              # 2 x 2, slow and fast network
    python -m scripts.bench.compare --nodes 2 4 --repetitions 3     # the long form
    python -m scripts.bench.compare --quick                         # one network, one repetition
    python -m scripts.bench.compare --pipelines --profiles slow-between-nodes --repetitions 5
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from scripts.bench.compare_measure import RUN_LIMIT_S, measure, prepare_environment
from scripts.report import compare_front
from scripts.report.compare_table import markdown
from scripts.report.records import append
from scripts.testbed.contenders.side_by_side import MICRO_BATCHES, Contender, contenders, pipelines
from scripts.testbed.contenders.torch_run import missing
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.machine import machine_record
from scripts.testbed.profile import PROFILES, NetworkProfile, named_profile
from scripts.testbed.ranks import Cluster


@dataclass(frozen=True)
class Study:
    """A cluster, a network, a workload, and the contenders of each repetition."""

    cluster: Cluster
    workload: Workload
    turns: list[list[Contender]]

    def run(self, file: Path, deadline_s: float) -> list[dict]:
        """Run all contenders in turns, appending a record of each run to `file`."""
        log = file.with_suffix(".log")
        records: list[dict] = []

        def keep(record: dict) -> None:
            records.append(record | self._described())
            append(file, records[-1])

        console = Console(stderr=True)
        with Progress(console=console) as progress:
            task = progress.add_task("", total=sum(map(len, self.turns)))
            broken: dict[str, str] = {}
            for repetition, chosen in enumerate(self.turns):
                for one in chosen:
                    progress.update(task, description=f"{one.name}, {repetition + 1}")
                    reason = one.reason or missing(one.torch_system) or broken.get(one.name, "")
                    if not reason and time.monotonic() > deadline_s:
                        reason = "not run: the time limit was reached"
                    record = {"kind": "run", "repetition": repetition} | asdict(one)
                    if not reason:
                        measured = measure(self.cluster, self.workload, one, RUN_LIMIT_S, log)
                        broken[one.name] = reason = measured.get("reason", "")
                        record |= measured
                    keep(record | {"reason": reason})
                    progress.advance(task)
        return records

    def _described(self) -> dict:
        return {
            "bench": "compare",
            "nodes": self.cluster.nodes,
            "ranks_per_node": self.cluster.ranks_per_node,
            "profile": asdict(self.cluster.profile),
            "workload": asdict(self.workload),
        }


def main() -> None:
    args = parse_args(sys.argv[1:])
    prepare_environment()
    file = args.out / "records.jsonl"
    file.unlink(missing_ok=True)
    deadline_s = time.monotonic() + 60 * args.time_limit
    records: list[dict] = [machine_record()]
    append(file, records[0])
    for study in _asked_for(args):
        cluster = study.cluster
        name = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.profile.name}"
        Console(stderr=True).print(name)
        records += study.run(file, deadline_s)
    text = markdown(records)
    (args.out / "table.md").write_text(text)
    compare_front.draw(records, args.out / "compare_front.png")
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    print(f"{args.out}/: records.jsonl, table.md, compare_front.png")


def _asked_for(args: argparse.Namespace) -> Iterator[Study]:
    for nodes in args.nodes:
        for profile in args.profiles:
            yield _study(args, nodes, profile)


def _study(args: argparse.Namespace, nodes: int, profile: NetworkProfile) -> Study:
    ranks = args.ranks
    samples = (MICRO_BATCHES // 2 if args.pipelines else 2) * nodes * ranks
    workload = replace(Workload(), samples=samples, steps=args.steps)
    chosen = [
        one
        for one in (pipelines if args.pipelines else contenders)(nodes, ranks, workload)
        if not args.only or any(name.lower() in one.name.lower() for name in args.only)
    ]
    return Study(Cluster(nodes, ranks, profile), workload, [chosen] * args.repetitions)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one network, one repetition")
    parser.add_argument(
        "--pipelines",
        action="store_true",
        help=f"interleaved pipelines of 2 stages with {MICRO_BATCHES} micro-batches instead",
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2], help="sizes of clusters")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument(
        "--profiles",
        nargs="+",
        default=["slow-between-nodes", "fast"],
        metavar="NAME",
        help=", ".join(PROFILES),
    )
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="contenders whose name contains one of these",
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="minutes for all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="FOLDER")
    args = parser.parse_args(argv)
    if args.quick:
        args.profiles, args.repetitions, args.nodes = args.profiles[:1], 1, args.nodes[:1]
        args.time_limit = min(args.time_limit, 10.0)
    for name in ("ranks", "repetitions", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(args.nodes) < 1 or any(nodes * args.ranks % 4 for nodes in args.nodes):
        parser.error("--nodes x --ranks must be a multiple of 4: TP 2 x PP 2 needs as many")
    profiles: list[NetworkProfile] = []
    for name in args.profiles:
        if name not in PROFILES:
            parser.error(f"--profiles {name}: not one of {', '.join(PROFILES)}")
        profiles.append(named_profile(name))
    args.profiles = profiles
    return args


if __name__ == "__main__":
    main()
