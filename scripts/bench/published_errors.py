# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the planner against measurements that others published.

In each series one constant, the share of its peak that a device reaches, is fitted on the points
marked `fit`; all others are predicted. It writes JSON lines, takes seconds and needs no quiet
machine.

    python -m scripts.bench.published_errors                       # prints the errors
    python -m scripts.bench.published_errors --out errors.jsonl
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.cluster import Cluster
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import (
    ADAPTED,
    Adapters,
    Attention,
    Batch,
    Experts,
    Layer,
    Mlp,
    Model,
    Parallel,
)
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.traffic import Wire
from scripts.report import planner_table
from scripts.report.records import append
from scripts.testbed.machine import machine_record

ROWS = Path(__file__).parent / "published_rows"
_HALVINGS = 12
_FITS = 8  # fixed-point iterations; a step is almost proportional to the fitted constant


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

    def predicted(self, efficiency: float, attention: float = 0.0) -> float:
        """Return the tokens per GPU and second, or the model FLOPs utilization."""
        device = self.cluster.device
        attention = attention or device.attention_tflops
        device = replace(device, efficiency=efficiency, attention_tflops=attention)
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
    mlp = Mlp(has["ffn"], is_gated=has.get("gated", True))
    if "experts" in has:
        mlp = Experts(has["experts"], has["topk"], has["ffn"], is_gated=True)
    layer = Layer(Attention(has["heads"], has["groups"], width), mlp)
    adapters = Adapters(has["adapters"], frozenset(ADAPTED)) if "adapters" in has else None
    return Model(
        has["hidden"],
        has["vocabulary"],
        (layer,) * has["layers"],
        is_tied=has.get("tied", False),
        has_bias=has.get("bias", False),
        norm_numel=has.get("norm_numel", 1),
        num_positions=has.get("num_positions", 0),
        adapters=adapters,
    )


def _points_of(series: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Yield points given singly, or as rows under `columns`, the first of which is fitted."""
    rows = [dict(zip(series["columns"], row, strict=True)) for row in series.get("rows", [])]
    return series.get("points", []) + [
        row | {"fit": index == 0, "name": _row_name(row)} for index, row in enumerate(rows)
    ]


def _row_name(row: Mapping[str, Any]) -> str:
    tp = f"TP {row['tp']}" if row.get("tp", 1) > 1 else ""
    batch = " x ".join(str(row[key]) for key in _OF_A_BATCH if key in row)
    return " ".join(filter(None, (tp, batch))) or "FSDP"


_OF_A_BATCH = ("micro_batches", "micro_batch", "seq_length")


def points(file: Path) -> Iterator[PublishedPoint]:
    rows = tomllib.loads(file.read_text())
    cluster = load_cluster(rows["cluster"])
    cluster = replace(cluster, ranks_per_node=rows.get("ranks_per_node", cluster.ranks_per_node))
    for part in ("device", "inside", "between"):
        cluster = replace(cluster, **{part: replace(getattr(cluster, part), **rows.get(part, {}))})
    for series in rows["series"]:
        model = model_of(rows["model"] | series.get("model", {}))
        for point in _points_of(rows["run"] | series):
            entries = rows["run"] | series | point | {"name": point.get("name")}
            share = entries["ranks"] // entries.get("tp", 1)
            entries = dict.fromkeys(("param", "grad", "optim"), share) | entries
            entries = {name: value for name, value in entries.items() if value is not None}
            on = cluster.with_ranks(entries["ranks"])
            yield PublishedPoint(file.stem, series["name"], entries, model, on, rows["unit"])


def fitted_efficiency(fits: list[PublishedPoint], attention: float = 0.0) -> float:
    """Return the constant for which predicted and measured `fits` have the same mean."""
    efficiency, wanted = 0.5, statistics.mean(point.entries["value"] for point in fits)
    for _ in range(_FITS):
        found = statistics.mean(point.predicted(efficiency, attention) for point in fits)
        efficiency = min(1.0, efficiency * wanted / found)
    return efficiency


def fitted_attention(fits: list[PublishedPoint], on: PublishedPoint) -> float:
    """Return the constants for which the point `on` of long sequences and `fits` hold."""
    low, high = 0.01 * on.cluster.device.tflops, on.cluster.device.tflops
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = on.predicted(fitted_efficiency(fits, middle), middle)
        low, high = (low, middle) if found > on.entries["value"] else (middle, high)
    return (low + high) / 2


def errors_of(file: Path) -> list[dict]:
    """One line for each point: error is predicted over measured, less one."""
    every = list(points(file))
    series: dict[str, list[PublishedPoint]] = {}
    for point in every:
        series.setdefault(point.series, []).append(point)
    fits = {
        name: [one for one in those if one.entries.get("fit")] for name, those in series.items()
    }
    on, attention = tomllib.loads(file.read_text()).get("attention_on"), 0.0
    if on is not None:
        those = series[on["series"]]
        (at,) = [one for one in those if one.entries["seq_length"] == on["seq_length"]]
        attention = fitted_attention(fits[on["series"]], at)
        fits[on["series"]].append(at)
    lines = []
    for name, those in series.items():
        efficiency = fitted_efficiency([one for one in those if one.entries.get("fit")], attention)
        for point in those:
            value, predicted = point.entries["value"], point.predicted(efficiency, attention)
            lines.append(
                {
                    "kind": "published",
                    "file": file.stem,
                    "series": name,
                    "name": point.name,
                    "ranks": point.cluster.num_ranks,
                    "model": point.model.num_params,
                    "seq_length": point.entries["seq_length"],
                    "fitted": point in fits[name],
                    "efficiency": efficiency,
                    "attention": attention,
                    "measured": value,
                    "predicted": predicted,
                    "error": predicted / value - 1,
                }
            )
    return lines


def pairs_of(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, bool]]:
    """Return pairs of alternatives whose measured speeds differ by more than 3%.

    Both have the same model, number of ranks and length of sequences, and not both are fitted. A
    pair has both names, and whether the faster one is predicted to be faster.
    """
    found = []
    for one, other in combinations(lines, 2):
        same = all(one[key] == other[key] for key in ("file", "model", "ranks", "seq_length"))
        faster, slower = sorted((one, other), key=lambda line: -line["measured"])
        is_apart = faster["measured"] > (1 + _APART) * slower["measured"]
        if same and is_apart and not (one["fitted"] and other["fitted"]):
            is_right = faster["predicted"] > slower["predicted"]
            names = [f"{line['series']}, {line['name']}" for line in (faster, slower)]
            found.append((*names, is_right))
    return found


_APART = 0.03


def summary(file: Path, lines: list[dict]) -> dict:
    """Compare the mean and worst error of predicted points with the bounds of the file."""
    rows = tomllib.loads(file.read_text())
    errors = [abs(line["error"]) for line in lines if not line["fitted"]]
    mean, worst = statistics.mean(errors), max(errors)
    return {
        "kind": "summary",
        "file": file.stem,
        **{name: rows[name] for name in ("title", "source", "assumed")},
        **{name: rows[name] for name in ("is_network_stated", "missed")},
        "points": len(errors),
        "fitted": len(lines) - len(errors),
        "pairs": len(pairs := pairs_of(lines)),
        "pairs_right": sum(is_right for *_, is_right in pairs),
        "mean": mean,
        "worst": worst,
        "mean_bound": rows["mean_bound"],
        "worst_bound": rows["worst_bound"],
        "holds": mean <= rows["mean_bound"] and worst <= rows["worst_bound"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines are appended here")
    asked = parser.parse_args(argv)
    lines: list[dict] = []
    for file in sorted(ROWS.glob("*.toml")):
        of_file = errors_of(file)
        lines += [*of_file, summary(file, of_file)]
    print(planner_table.markdown(lines), planner_table.misses(lines), sep="\n\n")
    if asked.out is not None:
        append(asked.out, machine_record(), *lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
