# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a collective has to wait for on its rank is what it cannot begin without."""

import random

from scripts.launch_order.commands import HOST, Command, commands_of
from scripts.launch_order.queues import dealt
from scripts.launch_order.record import Meeting


def random_program(chance: random.Random) -> list[Command]:
    """20 commands on 5 streams: collectives, events, waits of streams and of the host."""
    program: list[Command] = []
    for place in range(20):
        stream, earlier = (
            chance.randrange(5),
            [i for i, one in enumerate(program) if one.stream != HOST],
        )
        what = chance.choice(["collective", "event", "wait", "host"] if earlier else ["event"])
        after = chance.choice(earlier) if what in ("wait", "host") else -1
        meetings = (Meeting("all", (0, 1), False, place),) if what == "collective" else ()
        program.append(Command(HOST if what == "host" else stream, after, meetings))
    return program


def begun_without(program: list[Command], num_queues: int, held: int) -> set[int]:
    """The commands that begin where the one at `held` never ends and all others end at once."""
    begun: set[int] = set()
    while True:
        ended = begun - {held}
        found = {
            place
            for place, command in enumerate(program)
            if place not in begun
            and (command.after < 0 or command.after in ended)
            and all(
                one in ended
                for one in range(place)
                if program[one].stream == HOST
                or (
                    command.stream != HOST
                    and program[one].stream % num_queues == command.stream % num_queues
                )
            )
        }
        if not found:
            return begun
        begun |= found


def test_a_collective_needs_those_of_its_rank_without_whose_end_it_cannot_begin():
    for seed in range(100):
        program = random_program(random.Random(seed))
        for num_queues in (1, 2, 4, 8):
            queues = dealt(program, num_queues)
            kernels = [kernel for queue in queues for kernel in queue]
            held = {
                kernel.place: begun_without(program, num_queues, kernel.place) for kernel in kernels
            }
            for kernel in kernels:
                needed = {
                    earlier.place
                    for queue, count in zip(queues, kernel.needs, strict=True)
                    for earlier in queue[:count]
                }
                expected = {
                    place
                    for place, begun in held.items()
                    if place != kernel.place and kernel.place not in begun
                }
                assert needed == expected, (seed, num_queues, kernel)
                for queue, until in zip(queues, kernel.until, strict=True):
                    later = {one.place for one in queue[until:]}
                    waiting = {one.place for one in queue} - held[kernel.place]
                    assert later == waiting, (seed, num_queues, kernel)


def test_an_event_is_the_last_command_that_its_stream_had_when_it_was_recorded():
    before = [f'{{"on": [3, {number}]}}' for number in (4, 6, 7)]
    for number, place in ((3, -1), (4, 0), (5, 0), (6, 1), (7, 2), (9, 2)):
        for wait in ('{"on": [1, 1], ', "{"):
            *_, command = commands_of([*before, f'{wait}"after": [3, {number}]}}'])
            assert command.after == place, (number, wait)


def test_a_wait_for_what_was_asked_before_the_record_begins_holds_nothing_up():
    lines = [
        '{"on": [3, 7], "after": [5, 2]}',
        '{"on": [3, 8], "group": "A", "ranks": [0, 1]}',
        '{"on": [4, 1], "after": [3, 9]}',
        '{"on": [4, 2], "group": "B", "messages": [[0, 1], [0, 0], [1, 0]]}',
        '{"after": [3, 6]}',
    ]
    of_stream, of_group, after, kernel, host = commands_of(lines)
    assert of_stream == Command(3) and host == Command(HOST)
    assert of_group.meetings == (Meeting("A", (0, 1), False, 0),)
    assert after == Command(4, after=1)  # what the stream had by then
    assert kernel.meetings == (Meeting("B", (0, 1), True, 0), Meeting("B", (1, 0), True, 0))
