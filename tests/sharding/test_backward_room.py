# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Backward sends of the parameters what fills its links as far as the next forward's."""

import pytest

from megatron_asynchzp.engine.sharding.early_units import BackwardRoom, OuterTraffic


def sent(traffic: OuterTraffic, num_units: int, is_forced: bool = False) -> int:
    room = BackwardRoom()
    return sum(
        room.should_send(traffic, may_send=True, is_forced=is_forced) for _ in range(num_units)
    )


def test_a_third_of_the_parameters_is_sent_where_gradients_are_as_long_to_the_last_byte():
    """So the third unit is sent, for which exactly as much is left as it takes."""
    traffic = OuterTraffic(4.0, 4.0)
    assert [sent(traffic, num) for num in (2, 3, 5, 6, 9)] == [0, 1, 1, 2, 3]


def test_nothing_is_sent_where_gradients_take_all_that_backward_has():
    traffic = OuterTraffic(2.0, 4.0)
    assert sent(traffic, 100) == 0 and not traffic.may_have_room(is_forced=False)
    assert OuterTraffic(2.0, 3.9).may_have_room(is_forced=False)
    assert sent(traffic, 5, is_forced=True) == 5 and traffic.may_have_room(is_forced=True)


def test_what_is_not_sent_outside_its_shard_has_no_room_even_where_it_is_forced():
    traffic = OuterTraffic(0.0, 0.0)
    assert sent(traffic, 5, is_forced=True) == 0 and not traffic.may_have_room(is_forced=True)


@pytest.mark.parametrize("grads, share", [(0.0, 2 / 3), (1.0, 1 / 3), (1.5, 1 / 6)])
def test_the_share_that_is_sent_is_what_backward_has_left_over_three_times_a_unit(grads, share):
    assert sent(OuterTraffic(1.0, grads), 600) == pytest.approx(600 * share, abs=1)
