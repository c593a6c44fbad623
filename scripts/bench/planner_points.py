# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner is held against on the test-bed: clusters, models, and configurations of each,
as the planner and as Megatron's command line have them.
"""

from dataclasses import dataclass, replace

from megatron_asynchzp.planner.cluster import GIB, Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.search import Outcome, search
from megatron_asynchzp.planner.space import Space
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes
from scripts.testbed.megatron_flags import flags_of, size_flags, small_gpt
from scripts.testbed.profile import NetworkProfile, named_profile

RANKS = 4
_WORDS = 64
# Everything that is emulated takes twice as long as the profiles say: then what two cores take for
# four ranks is half as much of a step.
_SLOWED = 2
_TFLOPS = 6e-4 / _SLOWED  # of the emulated accelerators: a layer takes some 50 ms
_MEMORY_GB_S = 5.0  # of torch's AdamW on one core here, with the shards of "wide"
_MOST_RIVALS = 3
# No step reaches it, as few steps of a long run reach theirs: a step that is clipped sends again
# what it has sent early, and after three of them the engine sends nothing early.
_CLIP_GRAD = 100.0
_FIT_ROUNDS, _FITTED = 50, 0.005


@dataclass(frozen=True)
class SmallModel:
    """A GPT in fp32. One sequence is a micro-batch. gib: memory of a device, which rules plans
    out."""

    name: str
    layers: int
    hidden: int
    seq_length: int
    micro_batches: int
    gib: float = 1.0

    @property
    def planned(self) -> Model:
        layer = Layer(Attention(4, 4, self.hidden // 4), Mlp(4 * self.hidden, is_gated=False))
        return Model(
            self.hidden,
            _WORDS,
            (layer,) * self.layers,
            is_tied=False,
            has_bias=True,
            norm_numel=2,
            num_positions=self.seq_length,
            itemsize=4,
        )

    def flags(self, global_batch: int) -> list[str]:
        """Megatron's, without parallelism and the number of steps."""
        # fmt: off
        argv = small_gpt(
            self.layers, self.hidden, self.seq_length, words=_WORDS, micro_batch_size=1,
            global_batch_size=global_batch, lr=1e-3, min_lr=1e-3, lr_decay_style="constant",
            clip_grad=_CLIP_GRAD,
        )
        # fmt: on
        return [*argv, "--untie-embeddings-and-output-weights"]


@dataclass(frozen=True)
class EmulatedCluster:
    """An emulated cluster of RANKS ranks."""

    profile: NetworkProfile
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        return RANKS // self.nodes

    @property
    def name(self) -> str:
        return f"{self.profile.name}, {self.nodes} x {self.ranks_per_node}"

    def planned(self, gib: float, host: "Host | None" = None) -> Cluster:
        """With the speeds of the profile. gib: memory of a device; host: None for what is
        modelled alone."""
        profile, host = self.profile, host or Host()
        inside, between = (
            Link(
                min(profile.gbit(is_inter), 100.0) / 8,
                latency_us=1e6 * profile.latency_s(is_inter) + hop_us,
                shared=not is_inter,
            )
            for is_inter, hop_us in ((False, host.inside_us), (True, host.between_us))
        )
        device = Device(
            _TFLOPS,
            gib,
            efficiency=1.0,
            memory_gb_s=_MEMORY_GB_S,
            reserved_gib=0.0,
            launch_us=host.launch_us,
            step_us=host.step_us,
        )
        return Cluster(
            self.name, self.nodes, self.ranks_per_node, device, inside, between, runs_ahead=False
        )


@dataclass(frozen=True)
class Host:
    """What this machine adds to what is modelled, in microseconds: to a message from rank to rank,
    inside a node and between nodes; to a unit's forward and to a step (see planner's Device)."""

    inside_us: float = 0.0
    between_us: float = 0.0
    launch_us: float = 0.0
    step_us: float = 0.0


@dataclass(frozen=True)
class Point:
    """One configuration of a model on a network.

    schedule: of SCHEDULES; in_flight: the share of the memory in flight beyond the least that it
    may take; fitted: whether constants are fitted on it.
    """

    network: EmulatedCluster
    model: SmallModel
    sizes: ShardSizes
    micro_batches: int
    pp: int = 1
    schedule: str = "threaded"
    depth: int = 1
    in_flight: float | None = None
    fitted: bool = False

    @property
    def name(self) -> str:
        sizes = self.sizes
        parts = [f"({sizes.param}, {sizes.grad}, {sizes.optim}) x {self.micro_batches}"]
        parts += [f"PP {self.pp}"] * (self.pp > 1)
        parts += [self.schedule] * (self.schedule != "threaded")
        parts += [f"depth {self.depth}"] * (self.depth != 1)
        parts += ["least memory in flight"] * (self.in_flight is not None)
        return ", ".join(parts)

    @property
    def plan(self) -> Plan:
        return Plan(
            self.sizes,
            Parallel(pp=self.pp),
            Batch(1, self.model.seq_length, self.micro_batches),
            ScheduleConfig(self.schedule, self.depth, self._in_flight_nbytes),
        )

    @property
    def _in_flight_nbytes(self) -> int | None:
        if self.in_flight is None:
            return None
        plan = Plan(self.sizes, Parallel(pp=self.pp), Batch(1, self.model.seq_length))
        costing = Costing(self.model.planned, plan, self.network.planned(1.0))
        return costing.least_in_flight

    @property
    def layer_ms(self) -> float:
        """Forward of one sequence."""
        costing = Costing(self.model.planned, self.plan, self.network.planned(1.0))
        flops = next(unit.flops for unit in costing.units[0] if unit.kind == "layer")
        return 1e3 * flops / costing.cluster.device.flops_per_s

    @property
    def argv(self) -> list[str]:
        """Megatron's command line, without the number of steps."""
        replicas = RANKS // self.pp
        ours = {"asynchzp-schedule": self.schedule, "asynchzp-prefetch-depth": self.depth}
        if (nbytes := self._in_flight_nbytes) is not None:
            ours["asynchzp-memory-in-flight-gb"] = nbytes / GIB
        return [
            *self.model.flags(replicas * self.micro_batches),
            *flags_of({"pipeline-model-parallel-size": self.pp} | ours),
            *size_flags((self.sizes.param, self.sizes.grad, self.sizes.optim)),
        ]

    def predicted_s(self, host: Host) -> float:
        """A step."""
        cluster = self.network.planned(self.model.gib, host)
        return Costing(self.model.planned, self.plan, cluster).step().step_s


# ---- which


def _slowed(name: str) -> NetworkProfile:
    profile = named_profile(name)
    return replace(
        profile,
        name=f"{name} / {_SLOWED}",
        inter_gbit=profile.inter_gbit / _SLOWED,
        intra_gbit=profile.intra_gbit / _SLOWED,
        inter_latency_us=profile.inter_latency_us * _SLOWED,
        intra_latency_us=profile.intra_latency_us * _SLOWED,
    )


MODELS = (SmallModel("wide", 4, 192, 16, 1), SmallModel("deep", 6, 128, 32, 2))
NETWORKS = (
    EmulatedCluster(_slowed("slow-between-nodes"), 2),
    EmulatedCluster(_slowed("slower-between-nodes"), 2),
    EmulatedCluster(_slowed("fast"), 2),
    EmulatedCluster(_slowed("slow-between-nodes"), 4),
    EmulatedCluster(_slowed("slow-between-nodes"), 1),
)


def fit_points() -> list[Point]:
    """For what a unit takes beside the emulated time, and a step: of each model, one micro-batch
    and seven. Of sizes that gather and reduce, as most do, and on the fastest network, which hides
    least of what the host does. No error counts of a point that is fitted."""
    sizes = ShardSizes(2, 2, RANKS)
    return [
        Point(NETWORKS[2], model, sizes, count, fitted=True) for model in MODELS for count in (1, 7)
    ]


def further_points() -> list[Point]:
    """What a search does not vary: schedules, depths, budgets, micro-batches, pipelines."""
    wide, deep = MODELS
    slow = NETWORKS[0]
    node, world = ShardSizes(2, 2, 4), ShardSizes(4, 4, 4)
    return [
        Point(slow, deep, node, 2, schedule="inline"),
        Point(slow, wide, world, 1, depth=2),
        Point(slow, wide, world, 1, in_flight=0.0),
        Point(slow, wide, node, 4),
        Point(slow, deep, ShardSizes(2, 2, 2), 4, pp=2),
        Point(slow, deep, ShardSizes(1, 1, 2), 2, pp=2),
    ]


def found(network: EmulatedCluster, model: SmallModel, host: Host) -> Outcome:
    """What the planner finds."""
    start = Plan(ShardSizes(1, 1, 1), Parallel(), Batch(1, model.seq_length))
    space = Space(
        model.planned,
        network.planned(model.gib, host),
        RANKS * model.micro_batches,
        start,
        depths=(1,),
        micro_batch_sizes=(1,),
        recomputes=(start.recompute,),
    )
    return search(space)


def rivals(outcome: Outcome) -> list[ShardSizes]:
    """The sizes that are chosen, first; then the next best, and the best of each scheme that other
    systems have."""
    assert outcome.best is not None
    named = (one for one in outcome.baselines.values() if one is not None)
    every = (outcome.best, *outcome.ranked[:2], *named, *outcome.ranked)
    sizes = dict.fromkeys(one.plan.sizes for one in every)
    return list(sizes)[: 1 + _MOST_RIVALS]


def fitted(host: Host, few: Point, few_s: float, many: Point, many_s: float) -> Host:
    """`host` with what a unit and a step take, from two points that differ in micro-batches, and
    their measured steps."""
    found = replace(host, launch_us=0.0, step_us=0.0)
    # Once forward, twice backward; embedding and output are units beside the layers.
    times = 3 * (many.micro_batches - few.micro_batches) * (few.model.layers + 2)
    for _ in range(_FIT_ROUNDS):  # what is hidden behind communication takes more than one
        few_more_s = few_s - few.predicted_s(found)
        more_s = many_s - many.predicted_s(found) - few_more_s
        found = replace(
            found,
            launch_us=max(0.0, found.launch_us + 1e6 * more_s / times),
            step_us=max(0.0, found.step_us + 1e6 * few_more_s),
        )
    for point, step_s in ((few, few_s), (many, many_s)):
        if abs(point.predicted_s(found) / step_s - 1) > _FITTED:
            raise ValueError(f"{point.model.name}: nothing on the host explains {point.name}")
    return found
