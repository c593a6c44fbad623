# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where a rank's collectives stand in the queues of a device, and what each has to wait for.

    the host asks for            two queues       what must have ended on this rank first
    A on stream 0                0: A             A:
    B on stream 1                1: B             B:
    1 waits for A, C on 1        1: B wait C      C: A, B
    E on stream 2 = 0 mod 2      0: A E           E: A
    waits for C itself, F on 0   0: A E F         F: A, B, C, E

[Note: only collectives are left] All else that a host asks for ends at once when its turn comes,
takes nothing from anything, and once it has ended it stays so. So a wait or the record of an event
is over as soon as certain collectives have ended: all that stand before it in its queue, what these
wait for, and so on; for each queue they are its first so many, as in a vector clock. A wait of the
host holds up all that the host asks for later, whatever its stream.
"""

from bisect import bisect_right
from typing import NamedTuple

from scripts.launch_order.commands import HOST, Program
from scripts.launch_order.record import Meeting


class Kernel(NamedTuple):
    """A collective in its queue.

    place: in the order of the host; needs: of each queue of the rank how many of its first kernels
    have ended before this one begins; until: of each queue the first kernel that this one has to
    end before.
    """

    meetings: tuple[Meeting, ...]
    place: int
    needs: tuple[int, ...]
    until: tuple[int, ...]


def dealt(program: Program, num_queues: int) -> list[list[Kernel]]:
    """The queues that have a collective. Streams are dealt to queues in turn."""
    used = dict.fromkeys(one.stream % num_queues for one in program if one.meetings)
    index = {queue: place for place, queue in enumerate(used)}
    clocks = [[0] * len(index) for _ in range(num_queues)]  # what has ended where a queue is now
    host = [0] * len(index)
    awaited = {command.after for command in program}
    ends: dict[int, list[int]] = {}  # of awaited commands
    found: list[list[tuple[tuple[Meeting, ...], int, list[int]]]] = [[] for _ in index]
    for place, command in enumerate(program):
        after = ends[command.after] if command.after >= 0 else []
        if command.stream == HOST:
            _join(host, after)
            continue
        clock = clocks[command.stream % num_queues]
        _join(clock, host)
        _join(clock, after)
        if command.meetings:
            own = index[command.stream % num_queues]
            found[own].append((command.meetings, place, clock.copy()))
            clock[own] = len(found[own])
        if place in awaited:
            ends[place] = clock.copy()
    needs = [[clock for _, _, clock in kernels] for kernels in found]
    return [
        [
            Kernel(meetings, place, tuple(clock), _until(needs, own, number))
            for number, (meetings, place, clock) in enumerate(kernels)
        ]
        for own, kernels in enumerate(found)
    ]


def _join(clock: list[int], other: list[int]) -> None:
    for queue, count in enumerate(other):
        clock[queue] = max(clock[queue], count)


def _until(needs: list[list[list[int]]], own: int, number: int) -> tuple[int, ...]:
    return tuple(bisect_right(of_queue, number, key=lambda clock: clock[own]) for of_queue in needs)
