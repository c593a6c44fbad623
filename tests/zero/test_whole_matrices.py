# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are sharded, made whole on one owner each, and sent back: all ranks of a world in
one process, in step.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.unit import HZPUnit
from megatron_asynchzp.zero.whole_matrices import (
    Matrix,
    Round,
    assign_owners,
    fill_rounds,
    plan_rounds,
)
from tests.support.engine import nested_sizes

SHAPES = [(5, 7), (64, 3), (13, 13), (1, 130), (40, 9), (2, 2), (17, 5)]
SOME_WORLDS = [(world, sizes) for world in (1, 2, 4) for sizes in nested_sizes(world)]
SOME_WORLDS += [(6, (2, 6, 6)), (6, (3, 1, 3)), (8, (2, 4, 8)), (8, (4, 2, 8)), (8, (1, 2, 4))]


class _Sent(NamedTuple):
    group: tuple[int, ...]
    received: torch.Tensor
    received_splits: list[int]
    sent: torch.Tensor
    sent_splits: list[int]


class Rank:
    """One rank's units, matrices and rounds."""

    def __init__(self, world: int, rank: int, sizes: Sequence[int]):
        topology = ShardTopology(world, rank, ShardSizes(*sizes))
        everyone = list(range(world))
        self.groups = ShardGroups.of_topology(topology, everyone, lambda _, ranks: ranks)
        self.rank = rank
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, (9,), *SHAPES)]
        self.originals = [param.detach().clone() for param in params]
        named = [(str(index), param) for index, param in enumerate(params)]
        units = [HZPUnit(f"u{i}", named[i : i + 4], self.groups) for i in range(0, len(named), 4)]
        every = [Matrix(unit, index) for unit in units for index in range(len(unit.params))]
        self.matrices = [matrix for matrix in every if len(matrix.shape) == 2]
        costs = [float(matrix.numel) for matrix in self.matrices]
        self.rounds = plan_rounds(self.matrices, costs, self.groups)

    def original(self, matrix: Matrix) -> torch.Tensor:
        return self.originals[int(matrix.unit.param_names[matrix.index])].reshape(-1)

    def fragments(self, round_: Round) -> dict[Matrix, torch.Tensor]:
        return {m: m.unit.main_param_fragments()[m.index] for m in round_.matrices}


def all_ranks(world: int, sizes: Sequence[int]) -> list[Rank]:
    return [Rank(world, rank, sizes) for rank in range(world)]


def run_in_step(programs: Sequence) -> None:
    """Run one generator of collectives per rank; each collective has all ranks of its group. What
    a rank sends another and what that one expects must agree."""
    calls: list[_Sent] = []

    def all_to_all(received, sent, received_splits, sent_splits, group, async_op):
        assert async_op and sum(sent_splits) == sent.numel()
        assert sum(received_splits) == received.numel()
        calls.append(_Sent(group, received, received_splits, sent, sent_splits))

    waiting: dict[int, _Sent] = {}
    with mock.patch("torch.distributed.all_to_all_single", all_to_all):
        running = dict(enumerate(programs))
        while running:
            for rank in [rank for rank in running if rank not in waiting]:
                if next(running[rank], "ended") == "ended":
                    del running[rank]
                else:
                    waiting[rank] = calls.pop()
            ready = [rank for rank, call in waiting.items() if _is_complete(call, waiting)]
            assert ready or not running, "the ranks wait for each other"
            for rank in ready:
                _receive(rank, waiting)
            waiting = {rank: call for rank, call in waiting.items() if rank not in ready}


def _is_complete(call: _Sent, waiting: dict[int, _Sent]) -> bool:
    return all(rank in waiting and waiting[rank].group == call.group for rank in call.group)


def _receive(rank: int, waiting: dict[int, _Sent]) -> None:
    call = waiting[rank]
    parts = call.received.split(call.received_splits)
    for part, source in zip(parts, call.group, strict=True):
        other = waiting[source]
        part.copy_(other.sent.split(other.sent_splits)[other.group.index(rank)])


@pytest.mark.parametrize("world, sizes", SOME_WORLDS)
def test_each_copy_of_the_state_has_one_owner_per_matrix_and_none_owns_much_at_once(world, sizes):
    ranks = all_ranks(world, sizes)
    optim = sizes[2]
    for first in range(0, world, optim):
        owned = Counter(
            int(matrix.unit.param_names[matrix.index])
            for rank in ranks[first : first + optim]
            for round_ in rank.rounds
            for matrix in round_.owned
        )
        assert owned == Counter({i: 1 for i in range(15) if i != len(SHAPES)})
    largest = max(rows * columns for rows, columns in SHAPES)
    for rank in ranks:
        for round_ in rank.rounds:
            assert sum(matrix.numel for matrix in round_.owned) <= largest


@pytest.mark.parametrize("world, sizes", SOME_WORLDS)
def test_owners_get_the_whole_matrix_and_every_piece_returns_to_its_place(world, sizes):
    ranks = all_ranks(world, sizes)
    for number in range(len(ranks[0].rounds)):
        rounds = [rank.rounds[number] for rank in ranks]
        pieces = [rank.fragments(round_) for rank, round_ in zip(ranks, rounds)]
        wholes = [{m: torch.full((m.numel,), torch.nan) for m in r.owned} for r in rounds]
        run_in_step([r.gather_steps(p, w) for r, p, w in zip(rounds, pieces, wholes)])
        for rank, own in zip(ranks, wholes):
            for matrix, whole in own.items():
                assert torch.equal(whole, rank.original(matrix))
                whole.mul_(2)
        run_in_step([r.return_steps(w, p) for r, w, p in zip(rounds, wholes, pieces)])
    for rank in ranks:  # their pieces are views of the shards
        for matrix in rank.matrices:
            own = matrix.unit.main_param_fragments()[matrix.index]
            start = _start_of(matrix)
            assert torch.equal(own, 2 * rank.original(matrix)[start : start + own.numel()])


def _start_of(matrix: Matrix) -> int:
    """The first element of it that this rank holds."""
    own = matrix.unit.layout.slices[matrix.index].range
    part = own.intersect(matrix.unit.optim_range)
    return part.start - own.start if part.numel else 0


COSTS = st.lists(st.integers(1, 100).map(float), max_size=30)


@given(COSTS, st.integers(1, 9))
def test_no_owner_does_more_than_an_equal_share_and_one_piece_of_work(costs, num_owners):
    owners = assign_owners(costs, num_owners)
    loads = [0.0] * num_owners
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / num_owners + max(costs, default=0)
    assert sum(loads) == sum(costs)


def test_the_dearest_pieces_of_work_are_given_out_first():
    assert sorted(_loads([1.0, 1.0, 1.0, 1.0, 4.0], 2)) == [4.0, 4.0]
    assert sorted(_loads([3.0, 3.0, 2.0, 2.0, 2.0], 2)) == [5.0, 7.0]  # 6 and 6 would be best


def _loads(costs: list[float], num_owners: int) -> list[float]:
    owners = assign_owners(costs, num_owners)
    return [sum(c for c, owner in zip(costs, owners) if owner == one) for one in range(num_owners)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=30), st.integers(1, 20))
def test_rounds_hold_everything_once_and_of_each_owner_at_most_the_limit(work, limit):
    rounds = fill_rounds([n for n, _ in work], [o for _, o in work], limit)
    assert sorted(index for chosen in rounds for index in chosen) == list(range(len(work)))
    for chosen in rounds:
        assert chosen
        for owner in {work[index][1] for index in chosen}:
            own = [work[index][0] for index in chosen if work[index][1] == owner]
            assert sum(own) <= limit or len(own) == 1
