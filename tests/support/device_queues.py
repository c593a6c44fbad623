# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A device that lists what its host puts into streams, and a model of the hardware queues behind
them, over all ranks of a small world: which commands can never run.

[Note: hardware queues] A device maps its streams onto CUDA_DEVICE_MAX_CONNECTIONS queues. The
commands of a queue leave it in the order in which the host issued them, whatever their streams
are: one that cannot run yet holds up all that is behind it. A wait leaves when its event has
happened, a collective when the one before it in its stream has ended. It ends when all its ranks
have started it; where collectives fill the device it holds its queue until then.

    stream main     wait for A |                         one queue: B starts after A has ended,
    stream of B                | B                       although no stream orders it

The host never waits and computation takes no time: both delay, neither closes a circle.
"""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.support.recording_device import FinishedLater, Group, RecordingDevice

Counts = dict[Group, int]
"""An event: how many collectives of each group have ended."""


class Launch(NamedTuple):
    """A collective, put into the stream of its group; index: how many were issued there before."""

    stream: str
    group: Group
    index: int
    operation: str
    numel: int

    def __str__(self) -> str:
        return f"{self.operation} {self.index} of {self.group.name}"


class Wait(NamedTuple):
    """What comes later in `stream` runs after so many collectives of each group."""

    stream: str
    event: Counts

    def __str__(self) -> str:
        return " and ".join(f"{count} collectives of {g.name}" for g, count in self.event.items())


Command = Launch | Wait


class CommandLog(RecordingDevice):
    """Lists commands instead of accesses to memory.

    pause: seconds that a thread sleeps before it issues a command, for tests.

    commands: in the order in which the host issued them.
    """

    def __init__(self, pause: Callable[[], float] = lambda: 0.0):
        super().__init__()
        self.commands: list[Command] = []
        self._pause = pause
        self._ended: defaultdict[str, Counts] = defaultdict(dict)  # for what comes next in a stream
        self._num_issued: Counter[Group] = Counter()

    @property
    def launches(self) -> list[Launch]:
        """The collectives alone."""
        return [command for command in self.commands if isinstance(command, Launch)]

    def now(self) -> Counts:
        with self._lock:
            return dict(self._ended[self._current()])

    def order(self, event: Counts, stream: str) -> None:
        if seconds := self._pause():
            time.sleep(seconds)
        with self._lock:
            ended = self._ended[stream]
            news = {group: count for group, count in event.items() if count > ended.get(group, 0)}
            if news:
                self.commands.append(Wait(stream, news))
                ended.update(news)

    def _issue(self, operation: str, group: Group, read, written: torch.Tensor) -> FinishedLater:
        self.order(self.now(), group.name)
        with self._lock:
            index = self._num_issued[group]
            self._num_issued[group] = self._ended[group.name][group] = index + 1
            self.commands.append(Launch(group.name, group, index, operation, written.numel()))
        return FinishedLater(self, {group: index + 1})

    def collective(self, operation: str, group: Group, data: torch.Tensor) -> FinishedLater:
        """Issue a collective that is not the engine's after what the current stream got before."""
        return self._issue(operation, group, data, data)

    def operate(self, what: str, tensor: torch.Tensor, is_write: bool, stream=None) -> None:
        """Memory is not looked at."""

    def _noting(self) -> AbstractContextManager:
        return nullcontext()


@dataclass
class Connections:
    """The queues of every device. number: of queues; holds: whether a collective holds its queue
    until it has ended; seed: of the mapping, which is another one on every rank."""

    number: int
    holds: bool = False
    seed: int = 0
    _queue_of: dict[tuple[int, str], int] = field(default_factory=dict)

    def queue_of(self, rank: int, stream: str) -> int:
        key = rank, stream
        if key not in self._queue_of:
            self._queue_of[key] = random.Random(f"{self.seed} {key}").randrange(self.number)
        return self._queue_of[key]


def find_stuck(
    commands: Mapping[int, Sequence[Command]], connections: Connections
) -> dict[int, list[str]]:
    """What can never run: the first command of each queue that is left, by rank; empty where all
    ends. The outcome does not depend on which device is how fast: what can run stays able to.

    commands: of each rank of the world, in the order of its host.
    """
    queues: dict[tuple[int, int], list[Command]] = defaultdict(list)
    for rank, issued in commands.items():
        for command in issued:
            queues[rank, connections.queue_of(rank, command.stream)].append(command)
    world = _World(connections.holds)
    heads = dict.fromkeys(queues, 0)
    moves = True
    while moves:
        moves = False
        for (rank, number), queue in queues.items():
            head = heads[rank, number]
            while head < len(queue) and world.leaves(rank, queue[head]):
                head += 1
            moves |= head > heads[rank, number]
            heads[rank, number] = head
    stuck: dict[int, list[str]] = defaultdict(list)
    for (rank, number), queue in queues.items():
        if heads[rank, number] < len(queue):
            stuck[rank].append(f"queue {number}: {queue[heads[rank, number]]}")
    return stuck


class _World:
    """Which rank has started which collective."""

    def __init__(self, holds: bool):
        self._holds = holds
        self._started: dict[tuple, set[int]] = defaultdict(set)
        self._num_ended: dict[tuple[int, Group], int] = defaultdict(int)
        self._at: dict[tuple[int, Group], dict[int, tuple]] = defaultdict(dict)

    def _num_ended_of(self, rank: int, group: Group) -> int:
        """How many of the collectives of `group` have ended on `rank`."""
        keys, ended = self._at[rank, group], self._num_ended[rank, group]
        while ended in keys and len(self._started[keys[ended]]) == len(group.ranks):
            ended += 1
        self._num_ended[rank, group] = ended
        return ended

    def leaves(self, rank: int, command: Command) -> bool:
        """Start `command` if it can; whether it leaves its queue."""
        if isinstance(command, Wait):
            return all(self._num_ended_of(rank, g) >= n for g, n in command.event.items())
        group, index = command.group, command.index
        if self._num_ended_of(rank, group) < index:
            return False
        key = self._at[rank, group][index] = (group, index, command.operation, command.numel)
        self._started[key].add(rank)
        return not self._holds or self._num_ended_of(rank, group) > index
