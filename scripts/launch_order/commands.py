# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the host of a rank asks of its device, in order: collectives, and what streams and the
host wait for. It is read from the lines that the emulated device writes
(scripts/testbed/device/commands.hpp), or made of launches alone.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scripts.launch_order.record import Launch, Meeting, meetings_of

HOST = -1


class Command(NamedTuple):
    """stream: a number, in the order of first use, or HOST, which goes on when its wait is over;
    after: of the earlier commands of this rank the one that a wait waits for, else -1; meetings: of
    a collective or of messages that are one kernel, else none."""

    stream: int
    after: int = -1
    meetings: tuple[Meeting, ...] = ()


Program = Sequence[Command]
"""Of one rank."""


def launched(launches: Sequence[Launch]) -> list[Command]:
    """Launches alone: each group has a stream of its own, and nothing waits."""
    groups = list(dict.fromkeys(launch.group for launch in launches))
    return [
        Command(groups.index(meeting.group), meetings=(meeting,))
        for meeting in meetings_of(launches)
    ]


def commands_of(lines: Iterable[str]) -> list[Command]:
    """What a rank has recorded. What it waits for and was asked before the first line has ended.

    Raises ValueError, KeyError or TypeError for what are no such lines.
    """
    commands: list[Command] = []
    numbers: dict[int, list[tuple[int, int]]] = {}  # by stream: number there, place in `commands`
    seen: Counter[Meeting] = Counter()
    for line in lines:
        told: dict[str, Any] = json.loads(line)
        after = -1
        if "after" in told:
            stream, number = told["after"]
            places = [place for count, place in numbers.get(stream, []) if count <= number]
            after = places[-1] if places else -1
        if "on" not in told:
            commands.append(Command(HOST, after))
            continue
        stream, number = told["on"]
        numbers.setdefault(stream, []).append((number, len(commands)))
        commands.append(Command(stream, after, _meetings(told, seen)))
    return commands


def _meetings(told: dict[str, Any], seen: Counter[Meeting]) -> tuple[Meeting, ...]:
    group = told.get("group", "")
    keys: list[tuple[tuple[int, ...], bool]] = []
    if "ranks" in told:
        keys = [(tuple(told["ranks"]), False)]
    # A rank's message to itself holds nobody up.
    keys += [((source, to), True) for source, to in told.get("messages", []) if source != to]
    meetings = []
    for ranks, is_message in keys:
        one = Meeting(group, ranks, is_message, 0)
        meetings.append(one._replace(index=seen[one]))
        seen[one] += 1
    return tuple(meetings)


def num_waits(program: Program) -> int:
    return sum(command.after >= 0 for command in program)
