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
    assert worst_difference([3.0, *series], [2.0, *series]) == 0.5  # relative to the other
    with pytest.raises(ValueError):
        worst_difference(series, [1.0, *series])
    other = list(series)
    other[data.draw(st.integers(0, len(series) - 1))] = data.draw(st.sampled_from([broken, None]))
    assert worst_difference(series, other) == worst_difference(other, series) == inf
    assert largest(inf if one is None else one for one in other) == inf
    assert not isfinite(worst_difference(other, other)) or None in other
