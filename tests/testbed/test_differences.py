# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""No comparison of two runs passes over a number that is none."""

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.testbed.differences import largest, worst_difference

NUMBERS = st.floats(1e-3, 1e3)
BROKEN = st.sampled_from([nan, inf, -inf])


@given(st.lists(NUMBERS, min_size=1), BROKEN, st.data())
def test_a_number_that_is_none_is_infinitely_far_wherever_it_stands(series, broken, data):
    assert worst_difference(series, series) == 0.0 and largest(series) == max(series)
    other = list(series)
    other[data.draw(st.integers(0, len(series) - 1))] = data.draw(st.sampled_from([broken, None]))
    assert worst_difference(series, other) == worst_difference(other, series) == inf
    assert largest(inf if one is None else one for one in other) == inf
    assert not isfinite(worst_difference(other, other)) or None in other


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1))
def test_the_difference_is_relative_to_the_other_run(pairs):
    ours, others = zip(*pairs, strict=True)
    assert worst_difference(ours, others) == max(abs(a - b) / b for a, b in pairs)


def test_series_of_other_lengths_are_not_compared():
    with pytest.raises(ValueError):
        worst_difference([1.0], [1.0, 2.0])
