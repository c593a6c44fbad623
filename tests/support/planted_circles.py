# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns circles that are planted in what ranks launched, to see whether they are found."""

import random
from collections.abc import Iterator, Sequence

from scripts.launch_order.commands import Command, Program
from scripts.launch_order.interleavings import Device

DEVICES = (Device(1, 1), Device(32, 1, in_host_order=True))
"""Where an exchange is a circle for sure: both begin a rank's collectives one after the other."""


def exchanges(programs: Sequence[Program], seed: int) -> Iterator[list[Program]]:
    """Without end, programs in which one rank launches two collectives the other way round that
    follow each other there and that another rank has in the old order too. With one collective at a
    time each of the two ranks then is in one of them and waits for the other."""
    chance = random.Random(seed)
    places = [
        [place for place, command in enumerate(program) if _is_collective(command)]
        for program in programs
    ]
    while True:
        rank = chance.randrange(len(programs))
        index = chance.randrange(len(places[rank]) - 1)
        one, other = places[rank][index : index + 2]
        first, second = (programs[rank][place].meetings[0] for place in (one, other))
        shared = set(first.ranks).intersection(second.ranks) - {rank}
        if first.group != second.group and any(
            _place(programs[peer], first) < _place(programs[peer], second) for peer in shared
        ):
            yield [
                _exchanged(program, one, other) if number == rank else program
                for number, program in enumerate(programs)
            ]


def _is_collective(command: Command) -> bool:
    return bool(command.meetings) and not command.meetings[0].is_message


def _place(program: Program, meeting: object) -> int:
    return next(place for place, one in enumerate(program) if meeting in one.meetings)


def _exchanged(program: Program, one: int, other: int) -> list[Command]:
    """What comes in between waits for the first of the two no more: it has not been launched."""
    turned = {one: other, other: one}
    found = [
        command._replace(after=-1 if place < other and command.after == one else command.after)
        for place, command in enumerate(program)
    ]
    found = [command._replace(after=turned.get(command.after, command.after)) for command in found]
    found[one], found[other] = found[other], found[one]
    return found
