# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is kept within a budget: never more than it allows, and of equal units the most that any
choice could keep, which a flow through a network tells.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_asynchzp.engine.sharding.residency import Residency, kept_gaps, most_kept_nbytes
from tests.support.pipeline_order import most_kept_gaps

ORDERS = st.lists(st.tuples(st.integers(0, 5), st.just(0)), max_size=30)
LONG_ORDERS = st.lists(st.tuples(st.integers(0, 5), st.just(0)), min_size=12, max_size=40)
SIZES = {(index, 0): 3 * index + 1 for index in range(6)}


OWN = pytest.mark.parametrize("own", [False, True], ids=["beside its own", "with its own"])


def open_at(uses, kept, turn: int, own: bool) -> list:
    """Who is kept while the user at position `turn` has its turn, itself included with `own`."""
    ends = {start: uses.index(uses[start], start + 1) for start in kept}
    return [uses[start] for start in kept if start < turn < ends[start] + own]


@OWN
@settings(deadline=None, derandomize=True)
@given(ORDERS, st.integers(0, 30))
def test_what_is_kept_never_exceeds_the_budget(own, uses, budget):
    kept = kept_gaps(uses, SIZES.__getitem__, budget, own)
    turns = range(len(uses))
    at_a_turn = [sum(SIZES[u] for u in open_at(uses, kept, turn, own)) for turn in turns]
    most = most_kept_nbytes(uses, SIZES.__getitem__, kept, own)
    assert max(at_a_turn, default=0) == most <= budget


@OWN
@settings(deadline=None, derandomize=True)
@given(ORDERS | LONG_ORDERS, st.integers(0, 4))
def test_of_equal_units_no_choice_keeps_more(own, uses, room):
    assert len(kept_gaps(uses, lambda _: 1, room, own)) == most_kept_gaps(uses, room, own)


@settings(deadline=None, derandomize=True)
@given(ORDERS)
def test_a_large_budget_keeps_every_gap_and_none_keeps_those_with_nothing_between(uses):
    assert len(kept_gaps(uses, lambda _: 1, 6)) == len(uses) - len(set(uses))
    turns = {i for i in range(len(uses) - 1) if uses[i] == uses[i + 1]}
    assert kept_gaps(uses, lambda _: 1, 0) == turns
    assert not kept_gaps(uses, lambda _: 1, 0, counts_own=True)


# ---- step after step


def run_step(residency: Residency, uses) -> list[bool]:
    """For each use, whether what it needs had been kept."""
    kept, found = set(), []
    residency.restart()
    for user in uses:
        found.append(user in kept)
        kept.discard(user)
        residency.visit(user)
        if residency.keeps(user):
            kept.add(user)
    return found


USES = [*"abcabcbacba"]


def test_the_second_step_keeps_what_the_first_one_shows_to_be_worth_it():
    residency = Residency[str](1, lambda _: 1)
    assert not any(run_step(residency, USES))
    assert sum(run_step(residency, USES)) == len(kept_gaps(USES, lambda _: 1, 1)) == 5
    residency.restart()
    assert residency.num_hits == 5 and residency.planned_nbytes == 1


@settings(deadline=None, derandomize=True)
@given(ORDERS, ORDERS, ORDERS, st.integers(0, 4))
def test_one_that_is_told_the_record_of_another_goes_on_as_that_one(first, second, third, room):
    one, other = (Residency(room, lambda _: 1) for _ in range(2))
    run_step(one, first)
    run_step(one, second)
    other.expect(one.record)
    one_found, other_found = run_step(one, third), run_step(other, third)
    assert other_found == one_found and other.record == one.record
    assert run_step(other, third) == run_step(one, third)


def test_after_a_departure_nothing_more_is_kept_and_the_step_is_the_next_ones_record():
    residency = Residency[str](2, lambda _: 1)
    run_step(residency, USES)
    departed = [*"acbabc"]
    found = run_step(residency, departed)
    # "a" was kept before the departure, and is found.
    assert found == [False, False, False, True, False, False]
    assert sum(run_step(residency, departed)) == len(kept_gaps(departed, lambda _: 1, 2))


def test_a_step_with_fewer_micro_batches_is_followed_as_far_as_it_goes():
    residency = Residency[str](1, lambda _: 1)
    run_step(residency, "ababab")
    assert run_step(residency, "abab") == [False, False, True, True]
