# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What sending parameters before the update gains: Megatron's own pretrain(), with clipping, on 2
nodes of 2 emulated ranks, on a network on which communicating alone takes 1.10 times as long as
computing alone.

    python -m scripts.bench.early_update --out FILE

Ends with status 1, and without a record of that run, where a loss of an early update is not that of
the late one bit for bit.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.compare_calibration import compute_alone, foreign_of, step_ms
from scripts.bench.compare_measure import RUN_LIMIT_S, prepare_environment
from scripts.report.records import append
from scripts.testbed.contenders.megatron_run import train_megatron
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.differences import worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.profile import named_profile
from scripts.testbed.ranks import Cluster

NODES, RANKS = 2, 2
LOAD = 1.10  # communicating alone over computing alone
LAYERS_MS = 152.0  # forward of all layers, for one sample
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16, gradients in bf16": ("--bf16", "--grad-reduce-in-bf16"),
    "bf16, gradients in fp32": ("--bf16", "--accumulate-allreduce-grads-in-fp32"),
}
NEVER, ALWAYS = 1e6, 1e-4  # limits of the norm that no step reaches, and every step
_LATE, _EARLY = (("--asynchzp-early-update", way) for way in ("off", "auto"))


@dataclass(frozen=True)
class Bed:
    """A cluster and a workload in one precision."""

    cluster: Cluster
    workload: Workload
    flags: tuple[str, ...]

    @property
    def micro_batch(self) -> int:
        return self.workload.samples // self.cluster.num_ranks

    def train(self, clip_grad: float, *flags: str) -> list[RankReport]:
        work = replace(self.workload, clip_grad=clip_grad)
        all_flags = *self._sizes, "--asynchzp-schedule", "threaded", *self.flags, *flags
        call = train_megatron, work, self.micro_batch, all_flags
        return self.cluster.run(*call, timeout_s=RUN_LIMIT_S)

    @property
    def _sizes(self) -> list[str]:
        node, world = self.cluster.ranks_per_node, self.cluster.num_ranks
        return size_flags((node, node, world))

    def communicate(self) -> float:
        """Milliseconds of a step whose layers take no time."""
        instant = replace(self, workload=replace(self.workload, layer_ms=0.0))
        return step_ms(instant.train(NEVER, *_EARLY))

    def compute(self) -> float:
        """Milliseconds of a step without communication."""
        return step_ms(compute_alone(self.cluster, self.workload, self.micro_batch, RUN_LIMIT_S))

    def with_network(self, inter_gbit: float) -> "Bed":
        profile = replace(self.cluster.profile, inter_gbit=inter_gbit)
        return replace(self, cluster=replace(self.cluster, profile=profile))


def measure(precision: str, workload: Workload, repetitions: int) -> Iterator[dict]:
    """Records of one precision."""
    profile = named_profile("slower-between-nodes")
    bed = Bed(Cluster(NODES, RANKS, profile), workload, PRECISIONS[precision])
    computing = bed.compute()
    # Twice: latencies and what the processors do stay as they are.
    for _ in range(2):
        gbit = bed.cluster.profile.inter_gbit
        bed = bed.with_network(gbit * bed.communicate() / (LOAD * computing))
    communicating = bed.communicate()
    yield {
        "kind": "floor",
        "precision": precision,
        "compute_ms": computing,
        "communicate_ms": communicating,
        "inter_gbit": bed.cluster.profile.inter_gbit,
    }
    for repetition in range(repetitions):
        for clipped, limit in (("never", NEVER), ("always", ALWAYS)):
            late: list[float | None] = []
            for update, flags in (("late", _LATE), ("early", _EARLY)):
                reports = bed.train(limit, *flags)
                losses = next(one.losses for one in reports if None not in one.losses)
                late = late or losses
                _require_same(losses, late, f"{precision}, clipped {clipped}, {update}")
                yield {
                    "kind": "run",
                    "precision": precision,
                    "clipped": clipped,
                    "update": update,
                    "repetition": repetition,
                    "step_ms": [1e3 * value for value in reports[0].step_s],
                    "losses": losses,
                    "foreign": foreign_of(reports),
                }


def _require_same(losses: list[float | None], late: list[float | None], name: str) -> None:
    """End with a status where the losses of a run are not those of the late one, or are none."""
    if not losses or worst_difference(losses, late) > 0:
        sys.exit(f"early_update: {name}: losses {losses} are not those of the late run, {late}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="gets the records")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--only", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    args = parser.parse_args()
    prepare_environment()
    args.out.unlink(missing_ok=True)
    append(args.out, machine_record())
    layers = {"layers": args.layers, "layer_ms": LAYERS_MS / args.layers}
    workload = replace(Workload(), samples=2 * NODES * RANKS, warm_up=4, steps=args.steps, **layers)
    for precision in args.only:
        for record in measure(precision, workload, args.repetitions):
            append(args.out, record)
            if record["kind"] == "run":
                ms = statistics.median(record["step_ms"])
                print(f"{precision}, clipped {record['clipped']}, {record['update']}: {ms:.0f} ms")
            else:
                print(record, flush=True)


if __name__ == "__main__":
    main()
