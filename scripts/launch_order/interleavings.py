# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the search for a circle through every order in which devices may start what ranks launched.

    rank 0   queue 0:  A C        A collective begins on a rank when it is the first of its queue,
             queue 1:  B          what it waits for has ended and the device has a place for it. It
    rank 1   queue 0:  C A        keeps queue and place until it has begun on all its ranks.
             queue 1:  B

Computation takes no time, but what ranks have recorded of their waits holds launches up as on a
device. Of ranks that recorded none there are more orders here than there: what has no circle here
has none there.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from scripts.launch_order.commands import Program
from scripts.launch_order.queues import Kernel, dealt
from scripts.launch_order.record import Meeting


class Device(NamedTuple):
    """num_queues: hardware queues, to which streams are dealt in turn
    (CUDA_DEVICE_MAX_CONNECTIONS). A queue begins its next command when the one before has ended.
    num_places: collectives that can be on the device at once.
    in_host_order: whether no collective begins before all that the host launched earlier have
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
    programs: Sequence[Program],
    device: Device,
    max_states: int = 10_000_000,
    is_reduced: bool = True,
) -> Found:
    """Look for a circle in every order of beginnings, until one is found.

    programs: of each rank of the world; all that meet are there.
    is_reduced: whether of orders that come to the same only one is tried.
    """
    return _Search(programs, device).run(max_states, is_reduced)


class _Node(NamedTuple):
    """A kernel in the search.

    needs: states that queues have reached before it begins; meets: those of the queues in which
    what it meets has begun, its own included; is_single: whether all that it meets ends with it, as
    in a collective; rivals: of each other queue of its rank the state from which on that queue has
    nothing left that can be on the device beside it.
    """

    meetings: tuple[Meeting, ...]
    place: int
    needs: tuple[tuple[int, int], ...]
    meets: tuple[tuple[int, int], ...]
    is_single: bool
    rivals: tuple[tuple[int, int], ...]


class _Search:
    """A state has for each queue of each rank twice the number of operations that have ended, and
    one more where its next one has begun."""

    def __init__(self, programs: Sequence[Program], device: Device):
        self._device = device
        ranks = [dealt(program, device.num_queues) for program in programs]
        self._queues_of: list[range] = []  # of each rank
        members: dict[Meeting, list[tuple[int, int]]] = {}  # queues, with the states of beginning
        first = 0
        for queues in ranks:
            self._queues_of.append(range(first, first + len(queues)))
            for queue, kernels in enumerate(queues, first):
                for number, kernel in enumerate(kernels):
                    for meeting in kernel.meetings:
                        members.setdefault(meeting, []).append((queue, 2 * number + 1))
            first += len(queues)
        self._rank_of = {
            queue: rank for rank, queues in enumerate(self._queues_of) for queue in queues
        }
        self._members = members
        self._nodes = [
            [_node(kernel, kernels, own, own_range, members) for kernel in kernels]
            for queues, own_range in zip(ranks, self._queues_of)
            for own, kernels in enumerate(queues)
        ]
        self._end = [2 * len(nodes) for nodes in self._nodes]

    def run(self, max_states: int, is_reduced: bool) -> Found:
        state = [0] * len(self._nodes)
        if is_reduced:
            self._go_on(state, range(len(self._queues_of)))
        seen, stack = {array("H", state).tobytes()}, [state]
        while stack:
            state = stack.pop()
            choices = self._choices(state, is_reduced)
            if not choices and state != self._end:
                return Found(self._circle(state), len(seen), is_all=False)
            for queue in choices:
                after = state.copy()
                changed = self._begin(after, queue)
                if is_reduced:
                    self._go_on(after, changed)
                key = array("H", after).tobytes()
                if key not in seen:
                    seen.add(key)
                    stack.append(after)
            if len(seen) >= max_states and stack:
                return Found((), len(seen), is_all=False)
        return Found((), len(seen), is_all=True)

    def _begin(self, state: list[int], queue: int) -> set[int]:
        """Begin the next operation of `queue`, and end what that lets end. Returns the ranks at
        which something changed."""
        node = self._nodes[queue][state[queue] >> 1]
        state[queue] += 1
        changed = {self._rank_of[queue]}
        if node.is_single:
            ended = node.meets if _is_met(node, state) else ()
        else:
            ended = [
                (other, begun)
                for other, begun in node.meets
                if state[other] == begun and _is_met(self._nodes[other][begun >> 1], state)
            ]
        for other, _ in ended:
            state[other] += 1
            changed.add(self._rank_of[other])
        return changed

    # ---- what needs no choice

    def _go_on(self, state: list[int], changed: Iterable[int]) -> None:
        """Let begin and end what takes nothing from anything else.

        changed: ranks at which something began or ended.
        """
        left = set(changed)
        while left:
            queues = self._queues_of[left.pop()]
            while (queue := self._free_start(state, queues)) is not None:
                left |= self._begin(state, queue)

    def _is_due(self, state: list[int], queue: int) -> bool:
        """Whether the next operation of a queue could begin on a device with room for all."""
        now = state[queue]
        if now & 1 or now == self._end[queue]:
            return False
        for other, least in self._nodes[queue][now >> 1].needs:  # noqa: SIM110 - half the time
            if state[other] < least:
                return False
        return True

    def _free_start(self, state: list[int], queues: range) -> int | None:
        """A queue whose next operation can begin without ever keeping a place from another one. Not
        one that would end at once: it might have waited for another that began in its place.

        [Note: rivals] What is on a device beside an operation comes neither after it nor before it.
        If so few queues have such operations left that there is a place for all, the operation
        keeps none from any, in no order: to begin it now loses no circle.
        """
        startable = self._startable(state, queues)
        if self._device.in_host_order:
            return startable[0] if startable else None
        for queue in startable:
            rivals = self._nodes[queue][state[queue] >> 1].rivals
            if sum(state[other] < gone for other, gone in rivals) < self._device.num_places:
                return queue
        return None

    def _startable(self, state: list[int], queues: range) -> list[int]:
        """Queues of a rank whose next operation may begin now."""
        if sum(state[queue] & 1 for queue in queues) >= self._device.num_places:
            return []
        if not self._device.in_host_order:
            return [queue for queue in queues if self._is_due(state, queue)]
        # Of what has not begun only what the host launched first.
        following = [
            (self._nodes[queue][(state[queue] + 1) >> 1].place, queue)
            for queue in queues
            if (state[queue] + 1) >> 1 < len(self._nodes[queue])
        ]
        first = min(following)[1] if following else -1
        return [first] if following and self._is_due(state, first) else []

    # ---- what needs one

    def _choices(self, state: list[int], is_reduced: bool) -> list[int]:
        """Beginnings of which one comes next: those of a few ranks that others cannot change, where
        there are such, else all."""
        of_ranks = [self._startable(state, queues) for queues in self._queues_of]
        some = [rank for rank, choices in enumerate(of_ranks) if choices]
        for number in range(1, len(some) if is_reduced else 1):
            groups = combinations(some, number)
            for group in sorted(groups, key=lambda group: sum(len(of_ranks[one]) for one in group)):
                if self._are_left_alone(state, group):
                    return [queue for rank in group for queue in of_ranks[rank]]
        return [queue for rank in some for queue in of_ranks[rank]]

    def _are_left_alone(self, state: list[int], group: Sequence[int]) -> bool:
        """Whether nothing that other ranks may do ends an operation of these before one of them
        begins another: then no order of theirs gives these another choice.

        [Note: choices of a few ranks] Let all others go on as far as they ever could without them,
        each on a device with room for all. If still nothing of theirs has ended, then in every
        order the next beginning of theirs is one of these, and what others begin comes to the same
        before or after it.
        """
        if not any(state[queue] & 1 for rank in group for queue in self._queues_of[rank]):
            return True
        later, others = state.copy(), set(range(len(self._queues_of))).difference(group)
        left = others.copy()
        while left:
            for queue in self._queues_of[left.pop()]:
                if self._is_due(later, queue):
                    changed = self._begin(later, queue)
                    if not changed <= others:
                        return False
                    left |= changed
        return True

    # ---- what is found

    def _circle(self, state: list[int]) -> tuple[str, ...]:
        lines = []
        for queue, now in enumerate(state):
            if not now & 1:
                continue
            for meeting in self._nodes[queue][now >> 1].meetings:
                missing = sorted(
                    self._rank_of[other]
                    for other, begun in self._members[meeting]
                    if state[other] < begun
                )
                if missing:
                    where = ", ".join(map(str, missing))
                    rank = self._rank_of[queue]
                    lines.append(f"rank {rank} is in {meeting} and waits for {where}")
        return tuple(lines)


def _is_met(node: _Node, state: list[int]) -> bool:
    """Whether all that an operation meets has begun."""
    for other, begun in node.meets:  # noqa: SIM110 - half the time
        if state[other] < begun:
            return False
    return True


def _node(
    kernel: Kernel,
    kernels: Sequence[Kernel],
    own: int,
    queues: range,
    members: dict[Meeting, list[tuple[int, int]]],
) -> _Node:
    """A kernel with its rank's queues, and those of what it meets, in place of its own counts."""
    number = kernel.needs[own]
    # What the one before it in its queue needed has been there since.
    before = kernels[number - 1].needs if number else (0,) * len(queues)
    needs = [
        (queues[other], 2 * count)
        for other, count in enumerate(kernel.needs)
        if other != own and count > before[other]
    ]
    met = {place for meeting in kernel.meetings for place in members[meeting]}
    rivals = [(queues[other], 2 * gone) for other, gone in enumerate(kernel.until) if other != own]
    return _Node(
        kernel.meetings,
        kernel.place,
        tuple(needs),
        tuple(sorted(met)),
        not kernel.meetings[0].is_message,
        tuple(rivals),
    )
