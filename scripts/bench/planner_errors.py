# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the planner against steps that are measured on the test-bed in the same run: Megatron's
pretrain() on emulated clusters of 4 ranks. What this machine adds to the modelled times is found on
a few points; all others are predicted. Takes about fifteen minutes on two quiet cores.

    python -m scripts.bench.planner_errors --out runs/planner.jsonl
    python -m scripts.bench.planner_errors --points 3                 # a try of about two minutes
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from scripts.bench.compare_measure import prepare_environment
from scripts.bench.planner_measure import hop_us, measured
from scripts.bench.planner_points import (
    MODELS,
    NETWORKS,
    Host,
    Point,
    fit_points,
    fitted,
    found,
    further_points,
    rivals,
)
from scripts.report import planner_table
from scripts.report.records import append
from scripts.testbed.cpu_usage import FOREIGN_LIMIT, idle_foreign_share
from scripts.testbed.machine import machine_record

MEAN, WORST = 0.05, 0.12  # what errors may be
AS_GOOD, MOST_MISSED = 1.02, 0.1  # of the best step; of the choices
_BEGIN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGIN:4.0f} s] {text}", flush=True)


def hosts_of(points: Sequence[Point], steps: Sequence[list[float]], hops: Host) -> dict[str, Host]:
    """What the machine adds, by model. points: two of each model."""
    hosts: dict[str, Host] = {}
    for few, many in zip(points[::2], points[1::2], strict=True):
        few_s, many_s = (statistics.median(steps[points.index(one)]) for one in (few, many))
        host = hosts[few.model.name] = fitted(hops, few, few_s, many, many_s)
        _say(
            f"{few.model.name}: a unit {host.launch_us / 1e3:.1f} ms and a step "
            f"{host.step_us / 1e3:.0f} ms beside what is modelled"
        )
    return hosts


def points_of(hosts: dict[str, Host]) -> list[Point]:
    """Of each cluster and model what the planner chooses, first, and its rivals; then the rest."""
    points = [
        Point(network, model, sizes, model.micro_batches)
        for network in NETWORKS
        for model in MODELS
        for sizes in rivals(found(network, model, hosts[model.name]))
    ]
    return [*points, *further_points()]


def record(point: Point, steps_s: Sequence[float], host: Host) -> dict:
    measured_s, predicted_s = statistics.median(steps_s), point.predicted_s(host)
    return {
        "kind": "point",
        "network": point.network.name,
        "model": point.model.name,
        "name": point.name,
        "fitted": point.fitted,
        "step_ms": [1e3 * one for one in steps_s],
        "measured": 1e3 * measured_s,
        "predicted": 1e3 * predicted_s,
        "error": predicted_s / measured_s - 1,
    }


def choices(lines: Sequence[dict]) -> list[dict]:
    """For each cluster and model the step of the plan that is chosen, the first of its points,
    beside the best of all that were measured with as many micro-batches. lines: of the searches."""
    cases: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        cases.setdefault((line["network"], line["model"]), []).append(line)
    chosen = []
    for (network, model), those in cases.items():
        best = min(those, key=lambda line: line["measured"])
        chosen.append(
            {
                "kind": "choice",
                "network": network,
                "model": model,
                "chosen": those[0]["name"],
                "best": best["name"],
                "candidates": len(those),
                "ratio": those[0]["measured"] / best["measured"],
            }
        )
    return chosen


def summary(lines: Sequence[dict], chosen: Sequence[dict]) -> dict:
    errors = [abs(line["error"]) for line in lines if not line["fitted"]]
    good = sum(one["ratio"] <= AS_GOOD for one in chosen)
    mean, worst = statistics.mean(errors), max(errors)
    return {
        "kind": "summary",
        "points": len(errors),
        "mean": mean,
        "worst": worst,
        "mean_bound": MEAN,
        "worst_bound": WORST,
        "choices": len(chosen),
        "good_choices": good,
        "holds": mean <= MEAN
        and worst <= WORST
        and len(chosen) - good <= MOST_MISSED * len(chosen),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="JSON lines are appended here")
    add("--points", type=int, metavar="N", help="only the first N that are predicted")
    asked = parser.parse_args(argv)
    if asked.points is not None and asked.points < 1:
        parser.error(f"--points {asked.points}: give a number of at least 1")
    foreign = [idle_foreign_share()]
    if foreign[0] > FOREIGN_LIMIT:
        _say(f"others use {foreign[0]:.0%} of this machine: the errors will tell little")
    prepare_environment()
    with tempfile.NamedTemporaryFile(prefix="planner_errors_", suffix=".log") as file:
        log = Path(file.name)
        try:
            lines, hosts = measure(asked.points, log)
        except BaseException:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
    searched = [line for line in lines if line.pop("searched")]
    chosen = choices(searched)
    of_all = summary(lines, chosen)
    foreign.append(idle_foreign_share())
    if asked.out is not None:
        hosts_line = {"kind": "hosts", "foreign": max(foreign)}
        hosts_line |= {name: asdict(host) for name, host in hosts.items()}
        append(asked.out, machine_record(), hosts_line, *lines, *chosen, of_all)
    print(planner_table.testbed([*lines, *chosen, of_all]))
    return 0


def measure(most_points: int | None, log: Path) -> tuple[list[dict], dict[str, Host]]:
    """A record of each point, and what the machine adds."""
    hop = hop_us(NETWORKS[0], log)
    hops = Host(hop["inside"], hop["between"])
    _say(f"a message: {hops.inside_us:.0f} us in a node, {hops.between_us:.0f} us between nodes")
    fits = fit_points()
    twice = measured(fits[0].network, [*fits, *fits], log)
    fit_steps = [a + b for a, b in zip(twice, twice[len(fits) :])]  # all others follow from them
    hosts = hosts_of(fits, fit_steps, hops)
    as_fit = {replace(point, fitted=False): point for point in fits}
    points = [as_fit.get(point, point) for point in points_of(hosts)]
    num_searched = len(points) - len(further_points())
    points = points[:most_points]
    left = [point for point in points if not point.fitted]
    _say(f"{len(left)} configurations to measure")
    steps = dict(zip(fits, fit_steps, strict=True))
    for network in dict.fromkeys(point.network for point in left):
        those = [point for point in left if point.network == network]
        steps |= zip(those, measured(network, those, log), strict=True)
        _say(f"{network.name}: {len(those)} configurations")
    searched = set(points[:num_searched])
    lines = [
        record(point, steps[point], hosts[point.model.name]) | {"searched": point in searched}
        for point in dict.fromkeys([*points, *fits])
    ]
    return lines, hosts


if __name__ == "__main__":
    sys.exit(main())
