# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the planner against measurements that others published: of each series one constant, what
part of its peak a device reaches, is fitted on the points marked `fit`; all others are predicted.
Writes JSON lines; takes seconds and needs no quiet machine.

    python -m scripts.bench.published_errors                       # prints the errors
    python -m scripts.bench.published_errors --out errors.jsonl
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.cluster import Cluster
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing, Plan
from megatron_asynchzp.planner.model import Attention, Batch, Experts, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.traffic import Wire
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes
from scripts.report.records import append
from scripts.testbed.machine import machine_record

ROWS = Path(__file__).parent / "published_rows"
_FITS = 8  # fixed-point iterations; a step is all but proportional to what is fitted


@dataclass(frozen=True)
class PublishedPoint:
    """One published figure. entries: the whole configuration."""

    file: str
    series: str
    entries: Mapping[str, Any]
    model: Model
    cluster: Cluster
    unit: str

    @property
    def name(self) -> str:
        entries = self.entries
        sizes = [entries[state] for state in ("param", "grad", "optim")]
        return entries.get("name", "P, G, O = {}, {}, {}".format(*sizes))

    def predicted(self, efficiency: float) -> float:
        """Tokens per GPU and second, or the model FLOPs utilization."""
        device = replace(self.cluster.device, efficiency=efficiency)
        costing = Costing(self.model, self._plan(), replace(self.cluster, device=device))
        step_s = costing.step().step_s
        if self.unit == "mfu":
            return costing.mfu(step_s)
        return costing.tokens / step_s / self.cluster.num_ranks

    def _plan(self) -> Plan:
        has = self.entries
        tp = has.get("tp", 1)
        sizes = {name: has.get(name, 1) for name in ("pp", "cp", "ep")}
        virtual = has.get("virtual", 1) if sizes["pp"] > 1 else 1
        parallel = Parallel(tp=tp, sequence_parallel=tp > 1, virtual=virtual, **sizes)
        replicas = self.cluster.num_ranks // (tp * sizes["pp"] * sizes["cp"])
        tokens = has["micro_batch"] * has["seq_length"]
        count = has.get("micro_batches") or has["batch_tokens"] // (replicas * tokens)
        expert, depth = has.get("expert"), has.get("depth", 1)
        return Plan(
            ShardSizes(has["param"], has["grad"], has["optim"]),
            parallel,
            Batch(has["micro_batch"], has["seq_length"], count),
            ScheduleConfig(
                "auto" if depth else "inline", prefetch_depth=depth or 1, early_update="off"
            ),
            Recompute(has.get("recompute", "none")),
            Wire(has.get("grad_itemsize", 4), sums_rounded=True, pieces=has.get("pieces", 1)),
            expert_sizes=ShardSizes(expert, expert, expert) if expert else None,
            overlaps_params=has.get("overlaps_params", True),
        )


def model_of(has: Mapping[str, Any]) -> Model:
    width = has.get("head_dim", has["hidden"] // has["heads"])
    mlp = Mlp(has["ffn"], is_gated=True)
    if "experts" in has:
        mlp = Experts(has["experts"], has["topk"], has["ffn"], is_gated=True)
    layer = Layer(Attention(has["heads"], has["groups"], width), mlp)
    return Model(has["hidden"], has["vocabulary"], (layer,) * has["layers"], is_tied=False)


def points(file: Path) -> Iterator[PublishedPoint]:
    rows = tomllib.loads(file.read_text())
    cluster = load_cluster(rows["cluster"])
    for part in ("device", "inside", "between"):
        cluster = replace(cluster, **{part: replace(getattr(cluster, part), **rows.get(part, {}))})
    for series in rows["series"]:
        model = model_of(rows["model"] | series.get("model", {}))
        for point in series["points"]:
            entries = rows["run"] | series | point | {"name": point.get("name")}
            entries = {name: value for name, value in entries.items() if value is not None}
            on = cluster.with_ranks(entries["ranks"])
            yield PublishedPoint(file.stem, series["name"], entries, model, on, rows["unit"])


def fitted_efficiency(fits: list[PublishedPoint]) -> float:
    """For which the mean of what is predicted for `fits` is that of what was measured."""
    efficiency, wanted = 0.5, statistics.mean(point.entries["value"] for point in fits)
    for _ in range(_FITS):
        found = statistics.mean(point.predicted(efficiency) for point in fits)
        efficiency = min(1.0, efficiency * wanted / found)
    return efficiency


def errors_of(file: Path) -> list[dict]:
    """One line for each point: error is predicted over measured, less one."""
    lines = []
    every = list(points(file))
    for series in dict.fromkeys(point.series for point in every):
        those = [point for point in every if point.series == series]
        efficiency = fitted_efficiency([point for point in those if point.entries.get("fit")])
        for point in those:
            value, predicted = point.entries["value"], point.predicted(efficiency)
            lines.append(
                {
                    "kind": "published",
                    "file": file.stem,
                    "series": series,
                    "name": point.name,
                    "ranks": point.cluster.num_ranks,
                    "fitted": bool(point.entries.get("fit")),
                    "efficiency": efficiency,
                    "measured": value,
                    "predicted": predicted,
                    "error": predicted / value - 1,
                }
            )
    return lines


def summary(file: Path, lines: list[dict]) -> dict:
    """Mean and worst error of what was predicted, against the bounds of the file."""
    rows = tomllib.loads(file.read_text())
    errors = [abs(line["error"]) for line in lines if not line["fitted"]]
    mean, worst = statistics.mean(errors), max(errors)
    return {
        "kind": "summary",
        "file": file.stem,
        **{name: rows[name] for name in ("title", "source", "assumed")},
        "points": len(errors),
        "mean": mean,
        "worst": worst,
        "mean_bound": rows["mean_bound"],
        "worst_bound": rows["worst_bound"],
        "holds": mean <= rows["mean_bound"] and worst <= rows["worst_bound"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines are appended here")
    asked = parser.parse_args(argv)
    if asked.out is not None:
        append(asked.out, machine_record())
    for file in sorted(ROWS.glob("*.toml")):
        lines = errors_of(file)
        of_all = summary(file, lines)
        for line in lines:
            what = "fitted" if line["fitted"] else f"{line['error']:+.1%}"
            print(f"{line['series']:28} {line['name']:24} {line['ranks']:5} ranks  {what}")
        verdict = "holds" if of_all["holds"] else "MISSED"
        print(
            f"{of_all['title']}: mean {of_all['mean']:.1%}, worst {of_all['worst']:.1%} of "
            f"{of_all['points']} points; bounds {of_all['mean_bound']:.0%} and "
            f"{of_all['worst_bound']:.0%}: {verdict}\n"
        )
        if asked.out is not None:
            for line in (*lines, of_all):
                append(asked.out, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
