# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are sharded, made whole on one owner each, and sent back: all ranks of a world
as threads."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.comm.collectives import run_steps
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.engine.zero.whole_matrices import (
    Matrix,
    assign_owners,
    fill_rounds,
    plan_rounds,
)
from tests.support.engine import cut_sizes, nested_sizes, own_fragments
from tests.support.thread_ranks import on_threads

SHAPES = [(5, 7), (64, 3), (13, 13), (1, 130), (40, 9), (2, 2), (17, 5)]
SOME_WORLDS = [
    (world, sizes) for world in (1, 2, 4) for sizes in nested_sizes(world) + cut_sizes(world)
]
SOME_WORLDS += [(6, (2, 6, 6)), (6, (3, 1, 3)), (8, (2, 4, 8)), (8, (4, 2, 8)), (8, (1, 2, 4))]


class Rank:
    """One rank's units, matrices and rounds."""

    def __init__(self, groups: ShardGroups):
        generator = torch.Generator().manual_seed(0)  # threads share the global one
        shapes = (*SHAPES, (9,), *SHAPES)
        self.originals = [torch.randn(shape, generator=generator) for shape in shapes]
        named = [(str(i), torch.nn.Parameter(one.clone())) for i, one in enumerate(self.originals)]
        self.units = [HZPUnit(f"u{i}", named[i : i + 4], groups) for i in range(0, len(named), 4)]
        every = [Matrix(unit, index) for unit in self.units for index in range(len(unit.params))]
        self.matrices = [matrix for matrix in every if len(matrix.shape) == 2]
        costs = [float(matrix.numel) for matrix in self.matrices]
        self.rounds = plan_rounds(self.matrices, costs, groups)

    def original(self, matrix: Matrix) -> torch.Tensor:
        return self.originals[int(matrix.unit.param_names[matrix.index])].reshape(-1)


@pytest.mark.parametrize("world, sizes", SOME_WORLDS)
def test_each_copy_of_the_state_has_one_owner_per_matrix_and_none_owns_much_at_once(world, sizes):
    ranks = on_threads(Rank, world, sizes)
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


def double_every_matrix(groups: ShardGroups) -> None:
    """On its owner, between the two exchanges; all that is seen on this rank is asserted."""
    rank = Rank(groups)
    for round_ in rank.rounds:
        pieces = {m: m.unit.main_param_fragments()[m.index] for m in round_.matrices}
        wholes = {m: torch.full((m.numel,), torch.nan) for m in round_.owned}
        run_steps(round_.gather_steps(pieces, wholes))
        for matrix, whole in wholes.items():
            assert torch.equal(whole, rank.original(matrix))
            whole.mul_(2)
        run_steps(round_.return_steps(wholes, pieces))
    for unit in rank.units:  # the pieces are views of their shards
        originals = [rank.originals[int(name)] for name in unit.param_names]
        expected = own_fragments(unit, [2 * one if one.dim() == 2 else one for one in originals])
        assert all(map(torch.equal, unit.main_param_fragments(), expected))


@pytest.mark.parametrize("world, sizes", SOME_WORLDS)
def test_owners_get_the_whole_matrix_and_every_piece_returns_to_its_place(world, sizes):
    on_threads(double_every_matrix, world, sizes)


COSTS = st.lists(st.integers(1, 100).map(float), max_size=30)


@given(COSTS, st.integers(1, 9))
def test_no_owner_does_more_than_an_equal_share_and_one_piece_of_work(costs, num_owners):
    owners = assign_owners(costs, num_owners)
    loads = [0.0] * num_owners
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / num_owners + max(costs, default=0)
    assert sum(loads) == sum(costs)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=30), st.integers(1, 20))
def test_rounds_hold_everything_once_and_of_each_owner_at_most_the_limit(work, limit):
    rounds = fill_rounds([n for n, _ in work], [o for _, o in work], limit)
    assert sorted(index for chosen in rounds for index in chosen) == list(range(len(work)))
    for chosen in rounds:
        assert chosen
        for owner in {work[index][1] for index in chosen}:
            own = [work[index][0] for index in chosen if work[index][1] == owner]
            assert sum(own) <= limit or len(own) == 1
