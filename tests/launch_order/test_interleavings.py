# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The search for circles finds what every order of beginnings, tried one by one, finds."""

import random
from itertools import product

import pytest

from scripts.launch_order.interleavings import Device, search
from scripts.launch_order.record import Meeting, unmet_of

Orders = list[list[Meeting]]


def random_order(chance: random.Random, num_ranks: int, num_meetings: int) -> list[Meeting]:
    """One order that all ranks could have: each meeting of two ranks, half of them, or all."""
    order = []
    for index in range(num_meetings):
        size = chance.choice([2, max(2, num_ranks // 2), num_ranks])
        ranks = tuple(sorted(chance.sample(range(num_ranks), size)))
        order.append(Meeting(str(ranks), ranks, False, index))
    return order


def orders_of(order: list[Meeting], num_ranks: int) -> Orders:
    return [[one for one in order if rank in one.ranks] for rank in range(num_ranks)]


def has_circle(orders: Orders, device: Device) -> bool:
    """Every order of beginnings, one by one: a rank's state is what has begun there, by place."""
    queue_of = []
    for order in orders:
        groups = list(dict.fromkeys(one.group for one in order))
        number = max(1, min(device.num_queues, len(groups)))
        queue_of.append([groups.index(one.group) % number for one in order])

    def has_ended(state: tuple[frozenset[int], ...], meeting: Meeting) -> bool:
        return all(orders[rank].index(meeting) in state[rank] for rank in meeting.ranks)

    def starts(state: tuple[frozenset[int], ...], rank: int) -> list[int]:
        order = orders[rank]
        busy = [place for place in state[rank] if not has_ended(state, order[place])]
        if len(busy) >= device.num_places:
            return []
        found = []
        for place in range(len(order)):
            before = [
                earlier
                for earlier in range(place)
                if queue_of[rank][earlier] == queue_of[rank][place]
            ]
            is_first = all(one in state[rank] and one not in busy for one in before)
            is_next = not device.in_host_order or all(one in state[rank] for one in range(place))
            if place not in state[rank] and is_first and is_next:
                found.append(place)
        return found

    first = tuple(frozenset[int]() for _ in orders)
    seen, stack = {first}, [first]
    while stack:
        state = stack.pop()
        following = [(rank, one) for rank in range(len(orders)) for one in starts(state, rank)]
        if not following and any(len(own) < len(order) for own, order in zip(state, orders)):
            return True
        for rank, place in following:
            after = (*state[:rank], state[rank] | {place}, *state[rank + 1 :])
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return False


DEVICES = [Device(*one) for one in product((1, 2, 4), (1, 2, 3), (False, True))]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_the_search_finds_a_circle_where_some_order_of_beginnings_ends_in_one(is_swapped: bool):
    """Random orders of 2 and 3 ranks, on 18 devices each; some with two launches swapped."""
    outcomes = []
    for seed in range(40):
        chance = random.Random(seed)
        num_ranks = chance.choice([2, 3])
        orders = orders_of(random_order(chance, num_ranks, 5), num_ranks)
        if is_swapped:
            rank = max(range(num_ranks), key=lambda rank: len(orders[rank]))
            place = chance.randrange(len(orders[rank]) - 1)
            orders[rank][place : place + 2] = reversed(orders[rank][place : place + 2])
        for device in DEVICES:
            found = search(orders, device)
            assert bool(found.circle) == has_circle(orders, device), (seed, device)
            assert found.is_all or found.circle
            outcomes.append(bool(found.circle))
    assert 10 < sum(outcomes) < len(outcomes) - 10


def test_one_order_on_all_ranks_has_no_circle_in_one_queue_nor_where_the_host_orders_launches():
    for seed in range(50):
        orders = orders_of(random_order(random.Random(seed), 4, 40), 4)
        assert unmet_of(orders) == []
        for device in DEVICES:
            if device.num_queues == 1 or device.in_host_order:
                assert search(orders, device) == ((), 1, True), (seed, device)


@pytest.mark.parametrize("in_host_order", [False, True])
def test_20_of_20_planted_circles_are_found_in_orders_of_100_operations(in_host_order: bool):
    """Two launches that share two ranks, swapped on one of them."""
    num_planted = 0
    for seed in range(1000):
        chance = random.Random(seed)
        orders = orders_of(random_order(chance, 4, 100), 4)
        rank = chance.randrange(4)
        place = chance.randrange(len(orders[rank]) - 1)
        one, other = orders[rank][place : place + 2]
        if one.group == other.group or len(set(one.ranks) & set(other.ranks)) < 2:
            continue
        orders[rank][place : place + 2] = other, one
        device = Device(8, 1, True) if in_host_order else Device(1, 1)
        circle = search(orders, device).circle
        assert circle and all("waits for" in line for line in circle)
        num_planted += 1
        if num_planted == 20:
            return
    raise AssertionError(num_planted)


def test_it_stops_where_it_is_told_to_and_says_that_there_is_more():
    orders = orders_of(random_order(random.Random(3), 4, 60), 4)
    found = search(orders, Device(4, 2), max_states=50)
    assert (found.circle, found.num_states >= 50, found.is_all) == ((), True, False)
