# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where scaling is measured: the axes, the points on them, which contenders run at a point, and the
model of a run there.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scripts.bench.step_model import HSDP, SYSTEMS, AsyncHZP, ModelledRun
from scripts.testbed.contenders.side_by_side import Contender, contenders
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.profile import NetworkProfile

SAMPLES = 2  # of a micro-batch of a rank
WARM_UP = 2


@dataclass(frozen=True)
class Point:
    """One size of everything. The default is the base, where all axes meet."""

    nodes: int = 2
    ranks_per_node: int = 2
    micro_batches: int = 1
    seq_length: int = 64
    layers: int = 8
    hidden: int = 128

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def workload(self, layer_ms: float, steps: int) -> Workload:
        """layer_ms: of one sample of the base; computing grows with tokens and parameters. Every
        rank has the same samples, however many ranks there are."""
        base = Workload(seq_length=Point.seq_length, hidden=Point.hidden)
        work = Workload(
            layers=self.layers,
            hidden=self.hidden,
            seq_length=self.seq_length,
            samples=SAMPLES * self.micro_batches * self.num_ranks,
            warm_up=WARM_UP,
            steps=steps,
        )
        size = work.layer_numel / base.layer_numel * work.seq_length / base.seq_length
        return replace(work, layer_ms=layer_ms * size)

    def __str__(self) -> str:
        return (
            f"{self.nodes} x {self.ranks_per_node} ranks, {self.micro_batches} micro-batches, "
            f"sequences of {self.seq_length}, {self.layers} layers of {self.hidden}"
        )


@dataclass(frozen=True)
class Axis:
    """One thing that grows: `field` of the base. measured, modelled: its values."""

    name: str
    field: str
    measured: tuple[int, ...]
    modelled: tuple[int, ...]

    def place(self, point: Point) -> int:
        """Where `point` is on this axis."""
        return point.num_ranks if self.field == "nodes" else getattr(point, self.field)


AXES = (
    Axis("ranks", "nodes", (1, 2, 4, 8), (16, 32, 64, 128, 256)),
    Axis("micro-batches", "micro_batches", (1, 2, 4), (8, 16)),
    Axis("sequence-length", "seq_length", (32, 64, 128), (256, 512)),
    Axis("layers", "layers", (4, 8, 16), (32, 64)),
    Axis("hidden-size", "hidden", (64, 128, 256), (512, 1024)),
)


@dataclass(frozen=True)
class Plan:
    """Points with their places on the axes they are on, each point once."""

    measured: dict[Point, dict[str, int]]
    modelled: dict[Point, dict[str, int]]


def plan(axes: Sequence[str], ranks_per_node: int = 2, max_ranks: int | None = None) -> Plan:
    """Smallest clusters first; what has more than `max_ranks` is modelled only."""
    base = Point(ranks_per_node=ranks_per_node)
    measured: dict[Point, dict[str, int]] = defaultdict(dict)
    modelled: dict[Point, dict[str, int]] = defaultdict(dict)
    for axis in AXES:
        if axis.name not in axes:
            continue
        for value in (*axis.measured, *axis.modelled):
            point = replace(base, **{axis.field: value})
            is_small = max_ranks is None or point.num_ranks <= max_ranks
            kept = measured if value in axis.measured and is_small else modelled
            kept[point][axis.name] = axis.place(point)
    # The base first: a run that is stopped early has the point that all axes share.
    ordered = sorted(measured, key=lambda point: (point != base, point.num_ranks))
    return Plan({point: measured[point] for point in ordered}, dict(modelled))


def modelled_run(point: Point, profile: NetworkProfile, compute_ms: float) -> ModelledRun:
    """compute_ms: of a step at `point` without communication, however it was found out."""
    work = point.workload(0.0, 1)
    return ModelledRun(
        profile,
        point.nodes,
        point.ranks_per_node,
        point.layers,
        work.layer_numel,
        compute_ms / (3 * point.layers * point.micro_batches),
        point.micro_batches,
        work.embedding_numel,
        work.head_numel,
    )


def runners(point: Point, workload: Workload, only: Iterable[str] = ()) -> list[Contender]:
    """Those that are compared: one of each system of the cost model, named as that. only: those
    whose name contains one of these."""
    found = {one.name: one for one in contenders(point.nodes, point.ranks_per_node, workload)}
    node, world = point.ranks_per_node, point.num_ranks
    only = [text.lower() for text in only]
    chosen = []
    for system in SYSTEMS:
        is_ours = system is AsyncHZP
        one = found[f"AsyncHZP threaded ({node},{node},{world})" if is_ours else system.name]
        reason = "one node: this is ZeRO-3" if system is HSDP and point.nodes == 1 else ""
        if not only or any(text in system.name.lower() for text in only):
            chosen.append(replace(one, name=system.name, micro_batch=SAMPLES, reason=reason))
    return chosen


def slowed(profile: NetworkProfile, factor: float) -> NetworkProfile:
    """The same network in slow motion. Where computing is emulated as much more slowly, a step is
    `factor` times as long in every part that is modelled; what the machine really computes is not,
    and weighs that much less."""
    return replace(
        profile,
        inter_gbit=profile.inter_gbit / factor,
        intra_gbit=profile.intra_gbit / factor,
        inter_latency_us=profile.inter_latency_us * factor,
        intra_latency_us=profile.intra_latency_us * factor,
    )
