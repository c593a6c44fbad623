# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The lists of sub-samples that ranks run, filled so that ranks of a block have equally many."""

from itertools import product

import pytest

from megatron_asynchzp.planner.sub_samples import RoutedStep, evened


def _all_routes(ranks: int, groups: int, most: int):
    """Every number of sub-samples of each rank and group."""
    for counts in product(range(most + 1), repeat=ranks * groups):
        numbers = iter(range(sum(counts)))
        yield [
            [[next(numbers) for _ in range(counts[group * ranks + rank])] for rank in range(ranks)]
            for group in range(groups)
        ]


@pytest.mark.parametrize(
    "ranks, groups, most", [(1, 3, 3), (2, 2, 3), (3, 2, 2), (4, 2, 2), (4, 1, 4)]
)
def test_each_block_is_filled_to_its_longest_list_and_to_no_more(ranks, groups, most):
    for routes in _all_routes(ranks, groups, most):
        for block in (size for size in (1, 2, 3, 4) if ranks % size == 0):
            filled = evened(routes, block)
            fillers = [n for group in filled for own in group for n in own if n < 0]
            assert len(set(fillers)) == len(fillers)
            assert len(filled) == groups
            for number, (group, before) in enumerate(zip(filled, routes, strict=True)):
                for rank, (own, had) in enumerate(zip(group, before, strict=True)):
                    first = rank // block * block
                    longest = max(len(had) for had in before[first : first + block])
                    least = 1 if number == groups - 1 else 0
                    assert own[: len(had)] == had
                    assert all(n < 0 for n in own[len(had) :])
                    assert len(own) == max(longest, least)


def test_a_sub_sample_of_several_ranks_stays_in_the_lists_of_all_of_them():
    routes = [[[0, 3], [0, 3], [1], [2]], [[4], [4], [4], [4]]]
    assert evened(routes, 4) == [[[0, 3], [0, 3], [1, -1], [2, -2]], [[4], [4], [4], [4]]]
    assert evened(routes, 2) == routes == evened(routes, 1)


def test_a_step_counts_fillers_and_the_longest_list_and_waits_where_ranks_wait():
    """Seconds are tokens over ranks, and at least 2: what the gathers of a micro-batch take."""
    routes = [[[0, 3], [0, 3], [1], [2]], [[4], [4], [4], [4]]]

    def step(block: int) -> RoutedStep:
        seconds = lambda tokens, ranks: max(2.0, tokens / ranks)  # noqa: E731
        return RoutedStep(routes, [8, 6, 7, 12, 40], block, seconds)

    alone, pairs, together = step(1), step(2), step(4)
    assert alone.longest == pairs.longest == together.longest == 3
    assert (alone.filler_share, pairs.filler_share, together.filler_share) == (0, 0, 2 / 12)
    # Ranks 0 and 1 run 8 / 2 + 12 / 2, ranks 2 and 3 run 6 and 7; then all 40 / 4.
    assert alone.step_s == pairs.step_s == 10 + 10
    # All four in turns: the slowest of 4, 4, 6, 7, and of 6, 6 and two fillers.
    assert together.step_s == 7 + 6 + 10
