# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the search for a circle through every order in which devices may start what ranks launched.

    rank 0   queue 0:  A C        A collective begins on a rank when it is the first of its queue
             queue 1:  B          and the device has a place for it. It keeps both until it has
    rank 1   queue 0:  C A        begun on all its ranks.
             queue 1:  B

Nothing else holds a launch up: no event, no computation, no host. So there are more orders here
than on a device, and what has no circle here has none there.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from scripts.launch_order.record import Meeting


class Device(NamedTuple):
    """num_queues: hardware queues, to which communicators are dealt in turn
    (CUDA_DEVICE_MAX_CONNECTIONS). A queue begins its next operation when the one before has ended.
    num_places: collectives that can be on the device at once.
    in_host_order: whether nothing begins before all that the host launched earlier has
    (NCCL_LAUNCH_ORDER_IMPLICIT)."""

    num_queues: int
    num_places: int
    in_host_order: bool = False


class Found(NamedTuple):
    """circle: operations that have begun and can never end, with those that each waits for; empty
    where there are none; num_states: visited; is_all: whether there are no others."""

    circle: tuple[str, ...]
    num_states: int
    is_all: bool


def search(
    orders: Sequence[Sequence[Meeting]], device: Device, max_states: int = 10_000_000
) -> Found:
    """Look for a circle in every order of beginnings, until one is found.

    orders: what each rank of the world launches, in its order; all that meet are there.
    """
    return _Search(orders, device).run(max_states)


class _Search:
    """A state has for each queue of each rank twice the number of operations that have ended, and
    one more where its next one has begun."""

    def __init__(self, orders: Sequence[Sequence[Meeting]], device: Device):
        self._meetings = list(dict.fromkeys(one for order in orders for one in order))
        number = {meeting: index for index, meeting in enumerate(self._meetings)}
        self._queues: list[list[int]] = []  # of all ranks, one after the other: meetings
        self._places: list[list[int]] = []  # in the order of the host, of the same operations
        self._queues_of: list[range] = []  # of each rank
        # Of each meeting: its queues, each with the state in which it has begun there.
        self._members: list[list[tuple[int, int]]] = [[] for _ in self._meetings]
        for order in orders:
            groups = list(dict.fromkeys(meeting.group for meeting in order))
            num_queues = max(1, min(device.num_queues, len(groups)))
            first = len(self._queues)
            self._queues += [[] for _ in range(num_queues)]
            self._places += [[] for _ in range(num_queues)]
            self._queues_of.append(range(first, first + num_queues))
            for place, meeting in enumerate(order):
                queue = first + groups.index(meeting.group) % num_queues
                self._members[number[meeting]].append((queue, 2 * len(self._queues[queue]) + 1))
                self._queues[queue].append(number[meeting])
                self._places[queue].append(place)
        self._device = device
        self._end = [2 * len(queue) for queue in self._queues]
        self._rank_of = {
            queue: rank for rank, queues in enumerate(self._queues_of) for queue in queues
        }
        self._ranks_of = [
            {self._rank_of[queue] for queue, _ in members} for members in self._members
        ]

    def run(self, max_states: int) -> Found:
        ranks = range(len(self._queues_of))
        state = [0] * len(self._queues)
        self._go_on(state, set(ranks))
        seen, stack = {array("H", state).tobytes()}, [state]
        while stack:
            state = stack.pop()
            choices = self._choices(state)
            if not choices and state != self._end:
                return Found(self._circle(state), len(seen), is_all=False)
            for queue in choices:
                after = state.copy()
                self._go_on(after, self._begin(after, queue))
                key = array("H", after).tobytes()
                if key not in seen:
                    seen.add(key)
                    stack.append(after)
            if len(seen) >= max_states and stack:
                return Found((), len(seen), is_all=False)
        return Found((), len(seen), is_all=True)

    def _begin(self, state: list[int], queue: int) -> set[int]:
        """Begin the next operation of `queue`, and end it where that was the last of its ranks.
        Returns its ranks."""
        meeting = self._queues[queue][state[queue] >> 1]
        members = self._members[meeting]
        state[queue] += 1
        if all(state[other] == begun for other, begun in members):
            for other, _ in members:
                state[other] += 1
        return self._ranks_of[meeting]

    # ---- what needs no choice

    def _go_on(self, state: list[int], changed: set[int], frozen: int = -1) -> None:
        """Let begin and end what takes nothing from anything else.

        changed: ranks at which something began or ended.
        frozen: a rank that does not move, while all others are on devices with room for every
            queue.
        """
        changed = changed.copy()
        while changed:
            rank = changed.pop()
            if rank == frozen:
                continue
            find = self._free_start if frozen < 0 else self._any_start
            while (queue := find(state, self._queues_of[rank])) is not None:
                changed |= self._begin(state, queue)

    def _any_start(self, state: list[int], queues: range) -> int | None:
        return next((q for q in queues if not state[q] & 1 and state[q] != self._end[q]), None)

    def _free_start(self, state: list[int], queues: range) -> int | None:
        """A queue whose next operation can begin without keeping a place from another one. Not one
        that would end at once: it might have waited for another that began in its place."""
        starts = self._startable(state, queues)
        num_open = sum(state[q] != self._end[q] for q in queues)
        has_choice = not self._device.in_host_order and num_open > self._device.num_places
        return starts[0] if starts and not has_choice else None

    def _startable(self, state: list[int], queues: range) -> list[int]:
        """Queues of a rank whose next operation may begin now."""
        waiting = [q for q in queues if not state[q] & 1 and state[q] != self._end[q]]
        num_begun = sum(state[queue] & 1 for queue in queues)
        if num_begun >= self._device.num_places:
            return []
        if not self._device.in_host_order or not waiting:
            return waiting
        # Of what has not begun only what the host launched first.
        following = [
            (self._places[q][(state[q] + 1) // 2], q)
            for q in queues
            if (state[q] + 1) // 2 < len(self._places[q])
        ]
        first = min(following)[1]
        return [first] if first in waiting else []

    # ---- what needs one

    def _choices(self, state: list[int]) -> list[int]:
        """Beginnings of which one comes next: those of one rank that others cannot change, where
        there is one, else all."""
        of_ranks = [self._startable(state, queues) for queues in self._queues_of]
        some = [rank for rank, choices in enumerate(of_ranks) if choices]
        for rank in sorted(some, key=lambda rank: len(of_ranks[rank])):
            if self._is_left_alone(state, rank):
                return of_ranks[rank]
        return [queue for rank in some for queue in of_ranks[rank]]

    def _is_left_alone(self, state: list[int], rank: int) -> bool:
        """Whether nothing that other ranks may do ends an operation of this one before it begins
        another: then no order of theirs gives it another choice.

        [Note: one rank's choices] Let all others go on as far as they ever could without it, each
        on a device with room for all. If still nothing of this rank has ended, then in every order
        its next beginning is one of these, and those of others come to the same before or after.
        """
        queues = self._queues_of[rank]
        if not any(state[queue] & 1 for queue in queues):
            return True
        later = state.copy()
        self._go_on(later, set(range(len(self._queues_of))), frozen=rank)
        return all(later[queue] == state[queue] for queue in queues)

    # ---- what is found

    def _circle(self, state: list[int]) -> tuple[str, ...]:
        lines = []
        for rank, queues in enumerate(self._queues_of):
            for queue in queues:
                if not state[queue] & 1:
                    continue
                meeting = self._queues[queue][state[queue] >> 1]
                missing = sorted(
                    self._rank_of[other]
                    for other, begun in self._members[meeting]
                    if state[other] != begun
                )
                where = ", ".join(map(str, missing))
                lines.append(f"rank {rank} is in {self._meetings[meeting]} and waits for {where}")
        return tuple(lines)
