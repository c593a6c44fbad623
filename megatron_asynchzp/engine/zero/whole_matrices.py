# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Brings matrices that are sharded over the O ranks to an owner each, and back."""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from megatron_asynchzp.engine.comm.collectives import AxisGroup, Steps, all_to_all_steps, completed
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.engine.zero.unit import HZPUnit


@dataclass(frozen=True, eq=False)
class Matrix:
    """Parameter number `index` of `unit`; each rank holds the part in its O range."""

    unit: HZPUnit
    index: int

    @property
    def param(self) -> torch.nn.Parameter:
        return self.unit.params[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.slices[self.index].shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def held_numel(self, topology: ShardTopology, shard_size: int) -> int:
        """Return its elements in a shard of `shard_size` of the rank of `topology`."""
        own = topology.shard_range(shard_size, self.unit.layout.padded_numel)
        return own.intersect(self.unit.layout.slices[self.index].range).numel


Pieces = MutableMapping[Matrix, torch.Tensor]
"""1-D fp32: the part of each matrix that this rank holds."""


def assign_owners(costs: Sequence[float], num_owners: int) -> list[int]:
    """Give each piece, the dearest first, to the least busy owner: 4/3 of the best (Graham)."""
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(num_owners), key=lambda owner: loads[owner])
        loads[owners[index]] += costs[index]
    return owners


def fill_rounds(numels: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of each round: every owner's next `limit` elements, or one piece."""
    rounds: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}  # of each owner: its latest round, and its elements
    for index, (numel, owner) in enumerate(zip(numels, owners, strict=True)):
        number, used = filled.get(owner, (0, 0))
        if used and used + numel > limit:
            number, used = number + 1, 0
        filled[owner] = number, used + numel
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(index)
    return rounds


@dataclass(frozen=True, eq=False)
class _Hop:
    """This rank's part of the exchange along one axis."""

    axis: AxisGroup
    # Matrices whose pieces leave this rank, by the coordinate of their owner.
    sent: list[Matrix]
    sent_numels: list[int]  # of each matrix
    sent_splits: list[int]  # to each rank
    # Matrices whose owner has this rank's coordinate; every rank along the axis sends its piece.
    arriving: list[Matrix]
    arriving_numels: list[list[int]]  # per rank, of each matrix

    @property
    def arriving_splits(self) -> list[int]:
        return [sum(numels) for numels in self.arriving_numels]


class Round:
    """Some matrices, each on its way to its owner and back.

        O = 4, axes of 2 and 2           the outer axis          the inner axis
        rank   0  1  2  3                0     1     2    3       0
        owner 0's matrix                 -----------------        -------------
        a  c  b  d       ->              a b   c d          ->    a b c d

    Axes follow each other, the outermost first, where the pieces are smallest. Pieces that meet on
    a rank lie next to each other in the matrix, in the order of the ranks along the axis, because
    that axis cut them last. So nothing is sorted, and the communicators of the reductions suffice.
    Each owner is a rank within the O ranks.
    """

    def __init__(self, matrices: Sequence[Matrix], owners: Sequence[int], groups: ShardGroups):
        self.axes = (*groups.grad_reduce, *groups.grad_sync)
        topology = groups.topology
        rank = topology.rank % topology.sizes.optim
        self.matrices = list(matrices)
        self.owned = [m for m, owner in zip(matrices, owners, strict=True) if owner == rank]
        owner_of = dict(zip(matrices, owners, strict=True))
        self._hops = list(_plan_hops(self.axes, topology, owner_of))
        self._nothing = torch.empty(0, device=matrices[0].unit.device)

    def gather_steps(self, pieces: Pieces, wholes: Pieces) -> Steps:
        """Fill `wholes`, 1-D tensors of the owned matrices, from the `pieces` of all ranks."""
        held = dict(pieces)
        for hop in self._hops:
            sent = torch.cat([held.pop(matrix) for matrix in hop.sent])
            received = self._nothing.new_empty(sum(hop.arriving_splits))
            exchange = (received, hop.arriving_splits, sent, hop.sent_splits, hop.axis)
            yield from completed(all_to_all_steps(*exchange))
            parts = torch.split(received, [n for numels in hop.arriving_numels for n in numels])
            for index, matrix in enumerate(hop.arriving):
                held[matrix] = torch.cat(parts[index :: len(hop.arriving)])
        for matrix, whole in wholes.items():
            whole.copy_(held[matrix])

    def return_steps(self, wholes: Pieces, pieces: Pieces) -> Steps:
        held = dict(wholes)
        for hop in reversed(self._hops):
            numels = list(zip(*hop.arriving_numels, strict=True))
            parts = [
                torch.split(held.pop(matrix), list(of_ranks))
                for matrix, of_ranks in zip(hop.arriving, numels, strict=True)
            ]
            by_rank = (part[rank] for rank in range(hop.axis.axis.size) for part in parts)
            sent = torch.cat([self._nothing, *by_rank])
            received = self._nothing.new_empty(sum(hop.sent_splits))
            exchange = (received, hop.sent_splits, sent, hop.arriving_splits, hop.axis)
            yield from completed(all_to_all_steps(*exchange))
            held |= zip(hop.sent, torch.split(received, hop.sent_numels), strict=True)
        for matrix, piece in pieces.items():
            piece.copy_(held[matrix])


def _plan_hops(
    axes: Sequence[AxisGroup], topology: ShardTopology, owner_of: dict[Matrix, int]
) -> Iterator[_Hop]:
    for axis_group in reversed(axes):
        if not owner_of:
            return  # all ranks along the other axes return here, too
        axis = axis_group.axis
        by_coordinate: list[list[Matrix]] = [[] for _ in range(axis.size)]
        for matrix, owner in owner_of.items():
            by_coordinate[owner // axis.stride % axis.size].append(matrix)
        shard_size = axis.stride * axis.size
        sent = [matrix for matrices in by_coordinate for matrix in matrices]
        arriving = by_coordinate[axis.coordinate]
        members = [replace(topology, rank=member) for member in axis.members]
        yield _Hop(
            axis_group,
            sent,
            [matrix.held_numel(topology, shard_size) for matrix in sent],
            [sum(m.held_numel(topology, shard_size) for m in ms) for ms in by_coordinate],
            arriving,
            [[m.held_numel(member, shard_size) for m in arriving] for member in members],
        )
        owner_of = {matrix: owner_of[matrix] for matrix in arriving}


def plan_rounds(
    matrices: Sequence[Matrix], costs: Sequence[float], groups: ShardGroups
) -> list[Round]:
    """Return the rounds in which every matrix is whole on one O rank, equal on all O ranks.

    In a round a rank owns at most as many elements as the largest matrix has. The order of
    `matrices` is equal on all ranks of their sharding group.
    """
    order = sorted(range(len(matrices)), key=lambda index: -costs[index])
    owners = assign_owners([costs[index] for index in order], groups.topology.sizes.optim)
    numels = [matrices[index].numel for index in order]
    return [
        Round([matrices[order[i]] for i in chosen], [owners[i] for i in chosen], groups)
        for chosen in fill_rounds(numels, owners, max(numels, default=0))
    ]
