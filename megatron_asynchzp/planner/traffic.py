# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a rank sends: each operation's collectives, their bytes, messages and seconds."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.engine.schedule import DEFAULT_GRAD_SLOT_NBYTES
from megatron_asynchzp.engine.sharding.layout import PARAM_ALIGNMENT_NUMEL, piece_length, round_up
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster import Cluster, Ring
from megatron_asynchzp.planner.program import COMPUTE, GATHER, PARAM_SYNC, REDUCE, Action

ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"
ALL_REDUCE, ALL_TO_ALL = "all-reduce", "all-to-all"
INSIDE, BETWEEN = "inside", "between"
_FP32 = 4


class Collective(NamedTuple):
    """A collective of a rank."""

    operation: str
    numel: int  # of the whole tensor
    itemsize: int
    size: int  # ranks on the mesh axis
    stride: int  # of the axis, in ranks of the sharding group

    @property
    def turns(self) -> int:
        return 2 if self.operation == ALL_REDUCE else 1

    @property
    def wire_nbytes(self) -> int:
        """Payload that the rank sends."""
        # An all-reduce of a number of elements that the ranks do not divide is counted with equal
        # pieces, as NCCL's; shards always divide here except for tiny units.
        pieces = (self.size - 1) * self.numel * self.itemsize
        return self.turns * pieces // self.size

    @property
    def messages(self) -> int:
        return self.turns * (self.size - 1)


class Axis(NamedTuple):
    """An axis of the mesh: its ranks, and their distance in the group."""

    size: int
    stride: int


@dataclass(frozen=True)
class Wire:
    """The form in which states travel, the engine's by default."""

    grad_itemsize: int = _FP32  # bytes of an element of the gradients
    # shorter gradients are added on their way, as by NCCL; else their owner adds them in fp32
    sums_rounded: bool = False
    # messages of a unit whose whole tensors belong to a rank; sums over replicas are not cut
    pieces: int = 1
    # bytes of a weight, with its part of a scale, that is gathered as FP8 or FP4 codes; 0: none is
    code_nbytes: float = 0
    has_directions: bool = False  # forward and backward read other codes

    @property
    def is_exchanged(self) -> bool:
        """Whether gradients go to their owners without being added."""
        return self.grad_itemsize != _FP32 and not self.sums_rounded


@dataclass(frozen=True)
class Group:
    """A sharding group as all its ranks see it."""

    ranks: int  # of the group
    sizes: ShardSizes  # of the three states
    # of consecutive ranks, in global ranks (the tensor-parallel size for dense parameters)
    distance: int = 1
    wire: Wire = Wire()
    grad_slot_nbytes: int = DEFAULT_GRAD_SLOT_NBYTES  # see ScheduleConfig

    def axes(self, inner: int, outer: int) -> tuple[Axis, ...]:
        """Return axes from a shard of `inner` ranks to one of `outer`, innermost first."""
        # It is the mesh of ShardTopology, without its members.
        ends = self.sizes.boundaries(self.ranks)
        pairs = [pair for pair in zip(ends, ends[1:]) if inner <= pair[0] and pair[1] <= outer]
        return tuple(Axis(high // low, low) for low, high in pairs)

    @property
    def num_communicators(self) -> int:
        """Communicators of a rank: gathering and reducing have their own along each axis."""
        return len(self.axes(1, self.sizes.optim)) + len(self.axes(1, self.ranks))

    def padded(self, numel: int) -> int:
        return round_up(max(numel, 1), self.sizes.optim * PARAM_ALIGNMENT_NUMEL)


def unit_collectives(
    kind: int, padded_numel: int, itemsize: int, group: Group, in_codes: int = 0
) -> list[Collective]:
    """Return the collectives of an operation of `kind` (a lane, see planner/program.py), in order.

    itemsize: bytes of a parameter. in_codes: elements that are gathered as codes; the others
    travel at the end of a message, which is as long as the rank with most of them needs.
    """
    sizes = group.sizes
    if kind == GATHER and in_codes:
        axes = group.axes(1, sizes.param)
        agreed = [Collective(ALL_REDUCE, 1, _FP32, *axis) for axis in axes]
        codes = round(group.wire.code_nbytes * padded_numel)
        nbytes = codes + sizes.param * itemsize * (padded_numel - in_codes)
        return agreed + _gathers(min(nbytes, padded_numel * itemsize), 1, axes)
    if kind == GATHER:
        return _gathers(padded_numel, itemsize, group.axes(1, sizes.param))
    if kind == PARAM_SYNC:
        return _gathers(padded_numel // sizes.param, itemsize, group.axes(sizes.param, sizes.optim))
    if kind == REDUCE:
        collectives: list[Collective] = []
        for numel in grad_piece_numels(padded_numel, sizes.grad, group.grad_slot_nbytes):
            collectives += _reductions(numel, group.wire, group.axes(1, sizes.grad))
        return collectives
    shard = padded_numel // sizes.grad
    synced = _reductions(shard, group.wire, group.axes(sizes.grad, sizes.optim))
    replicas = group.axes(sizes.optim, group.ranks)
    return synced + _sums(padded_numel // sizes.optim, group.wire, replicas)


def grad_piece_numels(padded_numel: int, shards: int, slot_nbytes: int) -> list[int]:
    shard, length = padded_numel // shards, piece_length(padded_numel, shards, slot_nbytes)
    return [shards * min(length, shard - start) for start in range(0, shard, length)]


def _along(operation: str, numel: int, itemsize: int, axes: Sequence[Axis]) -> list[Collective]:
    """Return a collective for each axis, of the part that the axes before it leave."""
    collectives: list[Collective] = []
    for axis in axes:
        collectives.append(Collective(operation, numel, itemsize, *axis))
        numel //= axis.size
    return collectives


def _gathers(numel: int, itemsize: int, axes: Sequence[Axis]) -> list[Collective]:
    """Return the all-gathers, that of the outermost axis first, whose result is the smallest."""
    return _along(ALL_GATHER, numel, itemsize, axes)[::-1]


def _reductions(numel: int, wire: Wire, axes: Sequence[Axis]) -> list[Collective]:
    operation = ALL_TO_ALL if wire.is_exchanged else REDUCE_SCATTER
    return _along(operation, numel, wire.grad_itemsize, axes)


def _sums(numel: int, wire: Wire, axes: Sequence[Axis]) -> list[Collective]:
    itemsize = wire.grad_itemsize
    if not wire.is_exchanged:
        return [Collective(ALL_REDUCE, numel, itemsize, *axis) for axis in axes]
    return [
        Collective(operation, round_up(numel, axis.size), itemsize, *axis)
        for axis in axes
        for operation in (ALL_TO_ALL, ALL_GATHER)
    ]


# ---- on a cluster


def ring_of(collective: Collective, group: Group, cluster: Cluster) -> Ring:
    distance = collective.stride * group.distance
    return Ring.of_axis(collective.size, distance, cluster.ranks_per_domain)


class Transfer(NamedTuple):
    """Use of a link by a collective."""

    link: str
    busy_s: float  # seconds if nothing else uses the link
    latency_s: float = 0.0  # seconds until the end without use of the link


def transfers(collectives: Iterable[Collective], group: Group, cluster: Cluster) -> list[Transfer]:
    uses: list[Transfer] = []
    for each in collectives:
        ring = ring_of(each, group, cluster)
        link = BETWEEN if ring.crosses_nodes else INSIDE
        pieces = 1 if each.operation == ALL_REDUCE else group.wire.pieces
        nbytes = each.numel * each.itemsize / pieces
        costs = {ALL_TO_ALL: ring.exchange, ALL_REDUCE: ring.all_reduce}
        cost = costs.get(each.operation, ring.gather)(nbytes, cluster)
        uses.append(Transfer(link, pieces * cost.busy_s, pieces * cost.latency_s))
    return uses


@dataclass(frozen=True)
class Traffic:
    """A rank's traffic in a step."""

    collectives: dict[tuple[int, Collective], int]  # by kind of operation
    node_nbytes: float  # bytes that leave its node if all its ranks do the same

    @property
    def wire_nbytes(self) -> int:
        return sum(each.wire_nbytes * n for (_, each), n in self.collectives.items())

    @property
    def messages(self) -> int:
        return sum(each.messages * n for (_, each), n in self.collectives.items())


def step_traffic(
    actions: Iterable[Action],
    collectives: Callable[[int, int], Iterable[Collective]],
    groups: Sequence[Group],
    cluster: Cluster | None = None,
) -> Traffic:
    """Count the collectives of all `actions`.

    collectives: by kind of operation and number of a unit; groups: of each unit; cluster: None to
    count no nodes.
    """
    times = Counter((each.kind, each.unit) for each in actions if each.kind != COMPUTE)
    total: Counter[tuple[int, Collective]] = Counter()
    left = 0.0
    for (kind, unit), count in times.items():
        for each in collectives(kind, unit):
            total[kind, each] += count
            if cluster is not None:
                left += count * _node_nbytes(each, ring_of(each, groups[unit], cluster))
    return Traffic(dict(total), left)


def _node_nbytes(collective: Collective, ring: Ring) -> float:
    nbytes = collective.numel * collective.itemsize
    if collective.operation == ALL_TO_ALL:
        return ring.exchanged_node_nbytes(nbytes)
    return collective.turns * ring.node_nbytes(nbytes)
