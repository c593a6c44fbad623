# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which plans are possible for a model on a cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.activations import FUSED, Kernels, Recompute
from megatron_asynchzp.planner.cluster import Cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import (
    Batch,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    Parallel,
)
from megatron_asynchzp.planner.plan import Plan

VARIED = ("tp", "pp", "cp", "ep")
_MOST_SIZES = 8


@dataclass(frozen=True)
class Space:
    """The choices from which plans are made."""

    model: Model
    cluster: Cluster
    global_batch: int  # sequences of a step
    start: Plan  # kept if nothing is varied
    kernels: Kernels = FUSED
    vary: tuple[str, ...] = ()  # of VARIED
    depths: tuple[int, ...] = (1, 2)  # to try; None: that of start
    # to try; None: the powers of two that divide the batch
    micro_batch_sizes: tuple[int, ...] | None = None
    # to try; None: that of start
    recomputes: tuple[Recompute, ...] = (Recompute(), Recompute("full"))
    # of "param", "grad", "optim", those that are not chosen
    kept_sizes: Mapping[str, int] = field(default_factory=dict)
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def costing(self, plan: Plan) -> Costing:
        return Costing(self.model, plan, self.cluster, self.kernels, self.known)


def shard_divisors(ranks: int, in_node: int) -> list[int]:
    """Return sizes to try, within a node or of whole nodes: 1, a node, all, and some between."""
    divisors = all_divisors(ranks, in_node)
    kept = {1, ranks} | ({in_node} if in_node in divisors else set())
    rest = [size for size in divisors if size not in kept]
    room = max(0, _MOST_SIZES - len(kept))
    if len(rest) > room:
        rest = [rest[int((i + 0.5) * len(rest) / room)] for i in range(room)] if room else []
    return sorted(kept | set(rest))


def all_divisors(ranks: int, in_node: int) -> list[int]:
    """Return all divisors of `ranks` that lie within a node or consist of whole nodes."""
    divisors = (size for size in range(1, ranks + 1) if ranks % size == 0)
    return [size for size in divisors if in_node % size == 0 or size % in_node == 0]


def shard_sizes(
    ranks: int, in_node: int, kept: Mapping[str, int] | None = None
) -> Iterator[ShardSizes]:
    """Yield all sizes of `shard_divisors` that nest. kept: see Space.kept_sizes."""
    divisors = shard_divisors(ranks, in_node)
    to_try = dict.fromkeys(("param", "grad", "optim"), divisors)
    to_try |= {state: [size] for state, size in (kept or {}).items()}
    for optim, param, grad in product(to_try["optim"], to_try["param"], to_try["grad"]):
        sizes = ShardSizes(param, grad, optim)
        try:
            sizes.check(ranks)
        except ConfigurationError:
            continue
        yield sizes.with_short_axes(in_node)


def parallels(space: Space) -> Iterator[Parallel]:
    """Yield parallel sizes to try: the user's own, and others if the search may vary them."""
    start, cluster, model = space.start.parallel, space.cluster, space.model
    powers = [2**power for power in range(12) if 2**power <= cluster.num_ranks]
    experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]

    def choices(name: str) -> list[int]:
        if name == "ep" and not experts:
            return [1]
        return powers if name in space.vary else [getattr(start, name)]

    for tp, pp, cp, ep in product(*map(choices, VARIED)):
        sizes = replace(start, tp=tp, pp=pp, cp=cp, ep=ep)
        if sizes != start:
            if tp > cluster.ranks_per_domain:
                continue
            is_sequential = start.sequence_parallel or start.tp == 1
            sizes = replace(
                sizes,
                sequence_parallel=is_sequential and tp > 1,
                virtual=start.virtual if pp == start.pp else 1,
                stage_layers=start.stage_layers if pp == start.pp else None,
            )
            if any(undivided(model, sizes, space.start.batch.seq_length)):
                continue
        yield sizes


def undivided(
    model: Model, parallel: Parallel, seq_length: int
) -> Iterator[tuple[str, int, str, int]]:
    """Return each size that must divide another and does not, by Megatron's names of both."""
    tensor = "tensor-model-parallel-size", parallel.tp
    rows: list[tuple[str, int, str, int]] = []
    if parallel.sequence_parallel:
        rows.append(("seq-length", seq_length // parallel.cp, *tensor))
    if parallel.stage_layers is None:
        chunks = "pipeline-model-parallel-size" + " x virtual stages" * (parallel.virtual > 1)
        rows.append(("num-layers", len(model.layers), chunks, parallel.pp * parallel.virtual))
    layers = dict.fromkeys((*model.layers, *model.mtp))
    for part in dict.fromkeys(part for layer in layers for part in (layer.mixer, layer.mlp)):
        if isinstance(part, Mlp):
            rows += [("ffn-hidden-size", part.ffn, *tensor)]
        elif isinstance(part, Experts):
            of_experts = "expert-tensor-parallel-size", parallel.experts_tp
            rows += [("num-experts", part.num_experts, "expert-model-parallel-size", parallel.ep)]
            rows += [("moe-ffn-hidden-size", part.ffn, *of_experts)]
            rows += [("moe-shared-expert-intermediate-size", part.shared_ffn, *tensor)]
        elif isinstance(part, LatentAttention):
            rows += [("num-attention-heads", part.num_heads, *tensor)]
        elif part is not None:
            is_mamba = isinstance(part, Mamba)
            heads = "mamba-num-heads" if is_mamba else "num-attention-heads", part.num_heads
            groups = "mamba-num-groups" if is_mamba else "num-query-groups", part.num_groups
            rows += [(*heads, *tensor), (*heads, *groups)]
            if is_mamba or parallel.tp % part.num_groups:  # of attention ranks may share a group
                rows += [(*groups, *tensor)]
    return (row for row in rows if row[1] % row[3])


def batches(space: Space, parallel: Parallel) -> Iterator[Batch]:
    replicas, rest = divmod(space.cluster.num_ranks, parallel.tp * parallel.cp * parallel.pp)
    if rest or replicas == 0 or space.global_batch % replicas:
        return
    of_replica = space.global_batch // replicas
    own = space.start.batch.size
    asked = space.micro_batch_sizes or sorted({own, *(2**power for power in range(8))})
    for size in asked:
        if of_replica % size == 0:
            count = of_replica // size
            if parallel.virtual == 1 or count % parallel.pp == 0:
                yield Batch(size, space.start.batch.seq_length, count)


def plans(space: Space) -> Iterator[Plan]:
    for parallel in parallels(space):
        tp = parallel.tp
        ranks, rest = divmod(space.cluster.num_ranks, tp * parallel.pp)
        if rest or ranks % parallel.cp:
            continue
        if space.cluster.num_ranks % (parallel.experts_tp * parallel.ep * parallel.pp):
            continue
        in_node = min(ranks, max(1, space.cluster.ranks_per_domain // tp))
        every = shard_sizes(ranks, in_node, space.kept_sizes), dict.fromkeys(space.recomputes)
        for batch, sizes, recompute in product(batches(space, parallel), *every):
            for depth in space.depths if sizes.param > 1 else space.depths[:1]:
                schedule = _schedule(space.start, parallel, depth)
                yield replace(
                    space.start,
                    sizes=sizes,
                    schedule=schedule,
                    recompute=recompute,
                    parallel=parallel,
                    batch=batch,
                )


def _schedule(start: Plan, parallel: Parallel, depth: int) -> ScheduleConfig:
    allowed = start.schedule.in_flight_nbytes
    if allowed is not None:
        allowed = allowed * start.parallel.virtual // parallel.virtual
    return replace(start.schedule, prefetch_depth=depth, in_flight_nbytes=allowed)
