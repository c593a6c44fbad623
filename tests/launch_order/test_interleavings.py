# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The search for circles finds what every order of beginnings, tried one by one, finds."""

import random
from itertools import product

import pytest

from scripts.launch_order.commands import HOST, Command
from scripts.launch_order.interleavings import Device, search
from scripts.launch_order.record import Meeting, unmet_of

Programs = list[list[Command]]
Begun = tuple[frozenset[int], ...]


def random_order(chance: random.Random, num_ranks: int, num_meetings: int) -> list[Meeting]:
    """One order that all ranks could have: each meeting of two ranks, half of them, or all."""
    order = []
    for index in range(num_meetings):
        size = chance.choice([2, max(2, num_ranks // 2), num_ranks])
        ranks = tuple(sorted(chance.sample(range(num_ranks), size)))
        order.append(Meeting(str(ranks), ranks, False, index))
    return order


def programs_of(order: list[Meeting], num_ranks: int) -> Programs:
    """Each group has a stream of its own, on all its ranks."""
    groups = list(dict.fromkeys(one.group for one in order))
    return [
        [Command(groups.index(one.group), meetings=(one,)) for one in order if rank in one.ranks]
        for rank in range(num_ranks)
    ]


def with_messages(chance: random.Random, order: list[Meeting]) -> Programs:
    """Of two ranks a meeting becomes a message; two that follow each other on a rank, with the same
    stream, are one kernel now and then."""
    changed = [
        one._replace(is_message=len(one.ranks) == 2, ranks=tuple(chance.sample(one.ranks, 2)))
        if len(one.ranks) == 2
        else one
        for one in order
    ]
    num_ranks = 1 + max(rank for one in order for rank in one.ranks)
    programs = programs_of([one._replace(group=str(len(one.ranks))) for one in changed], num_ranks)
    for program in programs:
        for place in range(len(program) - 1, 0, -1):
            one, other = program[place - 1 : place + 1]
            are_messages = all(met.is_message for met in one.meetings + other.meetings)
            if are_messages and chance.random() < 0.3:
                program[place - 1 : place + 1] = [
                    one._replace(meetings=one.meetings + other.meetings)
                ]
    return programs


def with_waits(chance: random.Random, program: list[Command], num_waits: int) -> list[Command]:
    """So many waits of streams or of the host for something earlier, and records of events."""
    places = sorted(chance.randrange(1, len(program) + 1) for _ in range(num_waits))
    streams = [one.stream for one in program] + [9]
    found: list[Command] = []
    for place, command in enumerate([*program, None]):
        while places and places[0] == place:
            places.pop(0)
            stream = chance.choice([*streams, HOST])
            if stream != HOST and chance.random() < 0.3:
                found.append(Command(stream))
            else:
                of_streams = [index for index, one in enumerate(found) if one.stream != HOST]
                found.append(Command(stream, chance.choice(of_streams)))
        if command is not None:
            found.append(command)
    return found


def has_circle(programs: Programs, device: Device) -> bool:
    """Every order of all commands, one by one: a rank's state is which have begun and which of them
    have ended. A command of the host begins when those before it on the host have ended; any other
    when those of the host and of its queue have."""
    ranks = range(len(programs))
    ends_at_once = [[not command.meetings for command in program] for program in programs]
    at = {
        (rank, one): place
        for rank in ranks
        for place, command in enumerate(programs[rank])
        for one in command.meetings
    }
    before: list[list[list[int]]] = []  # of each rank's commands: those that end before they begin
    for program in programs:
        queues = [
            one.stream if one.stream == HOST else one.stream % device.num_queues for one in program
        ]
        before.append(
            [
                [
                    *(one for one in range(place) if queues[one] in (HOST, queues[place])),
                    *([command.after] if command.after >= 0 else []),
                ]
                for place, command in enumerate(program)
            ]
        )

    def has_ended(begun: Begun, rank: int, place: int) -> bool:
        return place in begun[rank] and all(
            at[other, one] in begun[other]
            for one in programs[rank][place].meetings
            for other in one.ranks
        )

    def starts(begun: Begun, rank: int) -> list[int]:
        program, busy = programs[rank], 0
        ended = {place for place in begun[rank] if has_ended(begun, rank, place)}
        busy = len(begun[rank]) - len(ended)
        found = []
        for place in range(len(program)):
            if place in begun[rank] or not ended.issuperset(before[rank][place]):
                continue
            earlier = [one for one in range(place) if not ends_at_once[rank][one]]
            is_next = not device.in_host_order or begun[rank].issuperset(earlier)
            if ends_at_once[rank][place] or (busy < device.num_places and is_next):
                found.append(place)
        return found

    first = tuple(frozenset[int]() for _ in ranks)
    seen, stack = {first}, [first]
    while stack:
        now = stack.pop()
        following = [(rank, one) for rank in ranks for one in starts(now, rank)]
        if not following and any(len(own) < len(program) for own, program in zip(now, programs)):
            return True
        for rank, place in following:
            after = (*now[:rank], now[rank] | {place}, *now[rank + 1 :])
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return False


DEVICES = [Device(*one) for one in product((1, 2, 4), (1, 2, 3), (False, True))]


def swap(program: list[Command], place: int, other: int) -> None:
    """Two launches change places; what the host waits for stays."""
    program[place], program[other] = program[other], program[place]


def compare_with_every_order(seeds: range, num_waits: int, has_messages: bool = False) -> int:
    """On 18 devices each, a half of them with two launches swapped. Returns how many have a
    circle."""
    num_circles = 0
    for seed in seeds:
        chance = random.Random(seed)
        num_ranks = chance.choice([2, 3])
        order = random_order(chance, num_ranks, 5)
        programs = with_messages(chance, order) if has_messages else programs_of(order, num_ranks)
        if seed % 2:
            program = max(programs, key=len)
            place = chance.randrange(len(program) - 1)
            swap(program, place, place + 1)
        programs = [with_waits(chance, one, num_waits) if one else one for one in programs]
        for device in DEVICES:
            found = search(programs, device)
            assert bool(found.circle) == has_circle(programs, device), (seed, device)
            assert found.is_all or found.circle
            every = search(programs, device, is_reduced=False)
            assert bool(every.circle) == bool(found.circle), (seed, device)
            num_circles += bool(found.circle)
    return num_circles


@pytest.mark.parametrize("num_waits, num_seeds", [(0, 16), (2, 16)])
def test_the_search_finds_a_circle_where_some_order_of_all_commands_ends_in_one(
    num_waits: int, num_seeds: int
):
    found = compare_with_every_order(range(num_seeds), num_waits)
    assert 10 < found < num_seeds * len(DEVICES) - 10


def test_messages_of_one_kernel_end_with_the_last_of_them():
    assert compare_with_every_order(range(10), 1, has_messages=True) > 10


@pytest.mark.slow
@pytest.mark.parametrize("has_messages", [False, True])
@pytest.mark.parametrize("num_waits", [0, 1, 2, 3, 4])
def test_the_search_agrees_with_every_order_of_all_commands_in_54000_small_worlds(
    num_waits: int, has_messages: bool
):
    assert compare_with_every_order(range(300), num_waits, has_messages) > 100


def test_one_order_on_all_ranks_has_no_circle_in_one_queue_nor_where_the_host_orders_launches():
    for seed in range(25):
        chance = random.Random(seed)
        order = random_order(chance, 4, 40)
        programs = programs_of(order, 4)
        assert unmet_of([[one for one in order if rank in one.ranks] for rank in range(4)]) == []
        for waits in (0, 20):
            waiting = [with_waits(chance, program, waits) for program in programs]
            for device in DEVICES:
                if device.num_queues == 1 or device.in_host_order:
                    assert search(waiting, device) == ((), 1, True), (seed, device)


@pytest.mark.parametrize("in_host_order", [False, True])
def test_20_of_20_planted_circles_are_found_in_orders_of_100_operations(in_host_order: bool):
    """Two launches that share two ranks, swapped on one of them, among 50 waits."""
    num_planted = 0
    for seed in range(1000):
        chance = random.Random(seed)
        programs = programs_of(random_order(chance, 4, 100), 4)
        program = programs[chance.randrange(4)]
        place = chance.randrange(len(program) - 1)
        one, other = (command.meetings[0] for command in program[place : place + 2])
        if one.group == other.group or len(set(one.ranks) & set(other.ranks)) < 2:
            continue
        swap(program, place, place + 1)
        programs = [with_waits(chance, one, 50) for one in programs]
        device = Device(8, 1, True) if in_host_order else Device(1, 1)
        circle = search(programs, device).circle
        assert circle and all("waits for" in line for line in circle)
        num_planted += 1
        if num_planted == 20:
            return
    raise AssertionError(num_planted)


def test_it_stops_where_it_is_told_to_and_says_that_there_is_more():
    programs = programs_of(random_order(random.Random(3), 4, 60), 4)
    found = search(programs, Device(4, 2), max_states=50)
    assert (found.circle, found.num_states >= 50, found.is_all) == ((), True, False)
