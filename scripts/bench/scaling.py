# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How step time, memory and the bytes between nodes grow with ranks, micro-batches, sequence length
and model size: measured on an emulated cluster as far as one machine goes, beyond it from the cost
model. Writes JSON lines, tables and a picture.

    python -m scripts.bench.scaling --out runs/scaling        # along ranks, at most ten minutes
    python -m scripts.bench.scaling --max-ranks 4 --slow-motion 1          # a try, two minutes
    python -m scripts.bench.scaling --axes all --repetitions 0             # the model alone
    python -m scripts.bench.scaling --axes all --max-ranks 16 --repetitions 2 --time-limit 180
"""

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from scripts.bench.compare_calibration import busy_of, compute_alone, emulated_ms, foreign_of
from scripts.bench.compare_measure import measure, prepare_environment
from scripts.bench.scaling_points import (
    AXES,
    SAMPLES,
    Plan,
    Point,
    modelled_run,
    plan,
    runners,
    slowed,
)
from scripts.bench.step_model import SYSTEMS, ModelledRun
from scripts.report.records import append, read
from scripts.report.scaling_picture import draw
from scripts.report.scaling_table import markdown
from scripts.testbed.contenders.side_by_side import Contender
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.cpu_usage import FOREIGN_LIMIT
from scripts.testbed.machine import machine_record
from scripts.testbed.profile import PROFILES, NetworkProfile, named_profile
from scripts.testbed.ranks import Cluster, RankFailure

_START_S = 120.0  # for starting and ending a run, with 16 ranks on two busy cores
_TIME_OVER = "not run: the time limit was reached"


@dataclass
class Study:
    """All points of a plan on one network. profile, layer_ms: before they are slowed down."""

    plan: Plan
    profile: NetworkProfile
    layer_ms: float
    slow_motion: float
    steps: int
    only: list[str]
    file: Path
    _broken: dict[tuple[Point, str], str] = field(default_factory=dict)
    _computed: set[Point] = field(default_factory=set)

    def model_all(self) -> None:
        """The model of every point, given the emulated computation alone."""
        for point in (*self.plan.measured, *self.plan.modelled):
            work = self._workload(point)
            self._keep_modelled(point, emulated_ms(work, point.num_ranks), "emulated")

    def measure_all(self, repetitions: int, deadline_s: float) -> None:
        """In turns: all points once, then again."""
        turns = [
            (repetition, point, one)
            for repetition in range(repetitions)
            for point in self.plan.measured
            for one in [None, *runners(point, self._workload(point), self.only)]
        ]
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(turns))
            for repetition, point, one in turns:
                name = one.name if one else "compute only"
                progress.update(task, description=name)
                is_over = time.monotonic() > deadline_s
                if one is not None:
                    outcome = self._run(point, one, repetition, is_over)
                elif point in self._computed or is_over:
                    outcome = ""
                else:
                    outcome = self._compute_alone(point, repetition)
                if outcome:
                    progress.console.print(f"{point}: {name} {outcome}", soft_wrap=True)
                progress.advance(task)

    # ---- one run, and a few words about its outcome

    def _workload(self, point: Point) -> Workload:
        return point.workload(self.slow_motion * self.layer_ms, self.steps)

    def _cluster(self, point: Point) -> Cluster:
        return Cluster(point.nodes, point.ranks_per_node, slowed(self.profile, self.slow_motion))

    def _limit_s(self, point: Point, steps: int) -> float:
        """Of one run: three times the slowest modelled one."""
        work = self._workload(point)
        run = self._modelled_run(point, emulated_ms(work, point.num_ranks))
        return _START_S + 3e-3 * steps * max(system(run).step_ms() for system in SYSTEMS)

    def _modelled_run(self, point: Point, compute_ms: float) -> ModelledRun:
        return modelled_run(point, slowed(self.profile, self.slow_motion), compute_ms)

    def _compute_alone(self, point: Point, repetition: int) -> str:
        """Once, and again where others were busy meanwhile."""
        work, record = self._workload(point), {"kind": "compute", "repetition": repetition}
        limit_s = self._limit_s(point, 3 * work.warm_up + work.steps)
        try:
            reports = compute_alone(self._cluster(point), work, SAMPLES, limit_s)
        except RankFailure as failure:
            reason = f"failed: {failure.reason[:160]}"
            self._keep(point, record | {"reason": reason})
            return reason
        # Of every rank: they are not in step, and the first one may be the last one.
        step_ms = [1e3 * statistics.median(report.step_s) for report in reports]
        foreign = foreign_of(reports)
        self._keep(
            point,
            record
            | {"reason": "", "step_ms": step_ms, "foreign": foreign, "busy": busy_of(reports)},
        )
        if foreign <= FOREIGN_LIMIT:
            self._computed.add(point)
        self._keep_modelled(point, statistics.median(step_ms), "measured")
        return f"{statistics.median(step_ms):.0f} ms"

    def _run(self, point: Point, one: Contender, repetition: int, is_over: bool) -> str:
        work = self._workload(point)
        reason = one.reason or self._broken.get((point, one.name)) or is_over * _TIME_OVER
        outcome: dict = {"kind": "run", "repetition": repetition} | asdict(one)
        if not reason:
            limit_s = self._limit_s(point, work.warm_up + work.steps)
            outcome |= measure(
                self._cluster(point), work, one, limit_s, self.file.with_suffix(".log")
            )
            reason = self._broken[point, one.name] = outcome.get("reason", "")
        self._keep(point, outcome | {"reason": reason})
        return reason or f"{statistics.median(outcome['step_ms']):.0f} ms"

    # ---- records

    def _keep_modelled(self, point: Point, compute_ms: float, compute: str) -> None:
        run = self._modelled_run(point, compute_ms)
        names = {
            one.name for one in runners(point, self._workload(point), self.only) if not one.reason
        }
        for system in SYSTEMS:
            if system.name in names:
                one = system(run)
                self._keep(
                    point,
                    {
                        "kind": "modelled",
                        "name": one.name,
                        "compute": compute,
                        "compute_ms": compute_ms,
                        "step_ms": one.step_ms(),
                        "node_nbytes": one.node_nbytes(),
                        "state_nbytes": one.state_nbytes(),
                    },
                )

    def _keep(self, point: Point, record: dict) -> None:
        work = self._workload(point)
        # fmt: off
        described = {
            "bench": "scaling", "point": asdict(point), "layer_ms": self.layer_ms,
            "axes": self.plan.measured.get(point) or self.plan.modelled[point],
            "emulated_ms": emulated_ms(work, point.num_ranks), "slow_motion": self.slow_motion,
            "profile": asdict(self.profile), "workload": asdict(work),
        }
        # fmt: on
        append(self.file, record | described)


def main() -> None:
    args = parse_args(sys.argv[1:])
    prepare_environment()
    file = args.out / "records.jsonl"
    file.unlink(missing_ok=True)
    append(file, machine_record())
    study = Study(
        plan(args.axes, args.ranks, args.max_ranks),
        args.profile,
        args.layer_ms,
        args.slow_motion,
        args.steps,
        args.only,
        file,
    )
    study.model_all()
    try:
        study.measure_all(args.repetitions, time.monotonic() + 60 * args.time_limit)
    except KeyboardInterrupt:
        print("stopped: what was measured so far is shown", file=sys.stderr)
    records = read([file])
    text = markdown(records)
    (args.out / "table.md").write_text(text)
    draw(records, args.out / "scaling.png")
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    pictures = ", ".join(sorted(file.name for file in args.out.glob("scaling*.png")))
    print(f"{args.out}/: records.jsonl, table.md, {pictures}")


def parse_args(argv: list[str]) -> argparse.Namespace:
    names = [axis.name for axis in AXES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--axes", nargs="+", default=["ranks"], metavar="AXIS", help=f"all, or {', '.join(names)}"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="contenders whose name contains one of these",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--max-ranks", type=int, default=8, help="beyond: modelled only")
    parser.add_argument(
        "--profile", default="slow-between-nodes", metavar="NAME", help=", ".join(PROFILES)
    )
    parser.add_argument(
        "--layer-ms", type=float, default=19.0, help="forward of a layer for one sample at the base"
    )
    parser.add_argument(
        "--slow-motion",
        type=float,
        default=3.0,
        metavar="FACTOR",
        help="computing and the network this much slower, so that what the "
        "machine really computes weighs as much less",
    )
    parser.add_argument("--repetitions", type=int, default=1, help="0: the model alone")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run")
    parser.add_argument("--time-limit", type=float, default=10.0, help="minutes for all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), metavar="FOLDER")
    return _checked(parser, parser.parse_args(argv))


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """With the profile in place of its name. Ends the process for what cannot be measured."""
    names = [axis.name for axis in AXES]
    if args.axes == ["all"]:
        args.axes = names
    for axis in args.axes:
        if axis not in names:
            parser.error(f"--axes {axis}: not one of {', '.join(names)}")
    for name, least in (("ranks", 1), ("max_ranks", 1), ("repetitions", 0), ("steps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    for name in ("layer_ms", "slow_motion"):
        if not 0 < getattr(args, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.profile not in PROFILES:
        parser.error(f"--profile {args.profile}: not one of {', '.join(PROFILES)}")
    names = [system.name for system in SYSTEMS]
    for text in args.only:
        if not any(text.lower() in name.lower() for name in names):
            parser.error(f"--only {text}: in none of {', '.join(names)}")
    args.profile = named_profile(args.profile)
    return args


if __name__ == "__main__":
    main()
