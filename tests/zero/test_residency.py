# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is kept within a budget: never more than it allows, and of equal units the most that any
choice could keep, which a flow through a network tells.
"""

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_asynchzp.zero.residency import kept_gaps
from tests.support.pipeline_order import Stage, most_kept_gaps

ORDERS = st.lists(st.tuples(st.integers(0, 5), st.just(0)), max_size=30)
SIZES = {(index, 0): 3 * index + 1 for index in range(6)}


def open_at(uses, kept, turn: int) -> list:
    """Who is kept while the user at position `turn` has its turn."""
    return [uses[start] for start in kept if start < turn < uses.index(uses[start], start + 1)]


@settings(deadline=None, derandomize=True)
@given(ORDERS, st.integers(0, 30))
def test_what_is_kept_never_exceeds_the_budget(uses, budget):
    kept = kept_gaps(uses, SIZES.__getitem__, budget)
    for turn in range(len(uses)):
        assert sum(SIZES[user] for user in open_at(uses, kept, turn)) <= budget


@settings(deadline=None, derandomize=True)
@given(ORDERS, st.integers(0, 6))
def test_of_equal_units_no_choice_keeps_more(uses, room):
    assert len(kept_gaps(uses, lambda _: 1, room)) == most_kept_gaps(uses, room)


@settings(deadline=None, derandomize=True)
@given(ORDERS)
def test_a_large_budget_keeps_every_gap_and_none_keeps_those_with_nothing_between(uses):
    assert len(kept_gaps(uses, lambda _: 1, 6)) == len(uses) - len(set(uses))
    turns = {i for i in range(len(uses) - 1) if uses[i] == uses[i + 1]}
    assert kept_gaps(uses, lambda _: 1, 0) == turns


STAGES = [
    Stage(pp, vpp, micro_batches, rank, recomputes=recomputes)
    for pp, vpp, micro_batches in ((1, 1, 8), (2, 1, 8), (4, 1, 8), (2, 2, 8), (4, 2, 8), (2, 4, 8))
    for rank, recomputes in product(sorted({0, pp - 1}), (False, True))
]


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_pipeline_stage_keeps_as_much_as_the_best_choice(stage):
    for uses in (stage.param_uses(), stage.grad_uses()):
        for room in (1, 2, stage.layers * stage.vpp - 1):
            assert len(kept_gaps(uses, lambda _: 1, room)) == most_kept_gaps(uses, room), room


def test_two_chunks_kept_of_a_deep_interleaved_pipeline_save_nine_gathers_in_ten():
    uses = Stage(pp=8, vpp=4, micro_batches=32).param_uses()
    gathers = [len(uses) - len(kept_gaps(uses, lambda _: 1, room)) for room in (0, 2, 4)]
    assert gathers == [447, 105, 29]


def test_one_chunk_of_gradients_kept_saves_seven_reductions_in_eight():
    uses = Stage(pp=8, vpp=4, micro_batches=32).grad_uses()
    assert [len(uses) - len(kept_gaps(uses, lambda _: 1, room)) for room in (0, 1)] == [256, 32]
