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
from collections.abc import Sequence
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
        choices = self._go_on(state, is_reduced)
        seen, stack = {array("H", state).tobytes()}, [(state, choices)]
        while stack:
            state, choices = stack.pop()
            if not choices and state != self._end:
                return Found(self._circle(state), len(seen), is_all=False)
            # What has begun on the fewest ranks is tried first: circles are soon found that way.
            for queue in sorted(choices, key=lambda queue: self._num_left(state, queue)):
                after = state.copy()
                self._begin(after, queue)
                following = self._go_on(after, is_reduced)
                key = array("H", after).tobytes()
                if key not in seen:
                    seen.add(key)
                    stack.append((after, following))
            if len(seen) >= max_states and stack:
                return Found((), len(seen), is_all=False)
        return Found((), len(seen), is_all=True)

    def _go_on(self, state: list[int], is_reduced: bool) -> list[int]:
        """Begin what comes next while one beginning is enough; then the choices."""
        if not is_reduced:
            return self._startable(state)
        while len(choices := self._choices(state)) == 1:
            self._begin(state, choices[0])
        return choices

    def _begin(self, state: list[int], queue: int) -> None:
        """Begin the next operation of `queue`, and end what that lets end."""
        node = self._nodes[queue][state[queue] >> 1]
        state[queue] += 1
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

    def _num_left(self, state: list[int], queue: int) -> int:
        """Of the next operation of a queue: on how many ranks it has not begun."""
        return sum(
            state[other] < begun for other, begun in self._nodes[queue][state[queue] >> 1].meets
        )

    # ---- what may come next

    def _startable(self, state: list[int]) -> list[int]:
        """Queues whose next operation may begin now."""
        return [queue for queues in self._queues_of for queue in self._of_rank(state, queues)]

    def _of_rank(self, state: list[int], queues: range) -> list[int]:
        if sum(state[queue] & 1 for queue in queues) >= self._device.num_places:
            return []
        due = [queue for queue in queues if self._is_due(state, queue)]
        if self._device.in_host_order and due:
            first = self._first_of_host(state, queues)
            return [first] if first in due else []
        return due

    def _is_due(self, state: list[int], queue: int) -> bool:
        """Whether the next operation of a queue could begin on a device with room for all."""
        now = state[queue]
        if now & 1 or now == self._end[queue]:
            return False
        for other, least in self._nodes[queue][now >> 1].needs:  # noqa: SIM110 - half the time
            if state[other] < least:
                return False
        return True

    def _first_of_host(self, state: list[int], queues: range) -> int:
        """The queue of what the host launched first of all that has not begun."""
        following = [
            (self._nodes[queue][(state[queue] + 1) >> 1].place, queue)
            for queue in queues
            if (state[queue] + 1) >> 1 < len(self._nodes[queue])
        ]
        return min(following)[1]

    def _choices(self, state: list[int]) -> list[int]:
        """Beginnings of which one has to come next, as few as are found: where every order begins
        with one of them, or could as well.

        [Note: stubborn sets] A. Valmari, "Stubborn sets for reduced state space generation", 1989.
        A set of queues is such that whatever happens outside of it, what may begin in it may still
        begin, to the same effect, and what may not still may not. So no circle is lost where only
        beginnings of the set are tried.
        """
        startable: list[int] = []
        for queues in self._queues_of:
            own = self._of_rank(state, queues)
            for queue in own:
                if not self._rivals(state, queue):
                    return [queue]
            startable += own
        fewest, may_begin = startable, set(startable)
        for queue in startable:
            fewest = self._closed(state, queue, may_begin, len(fewest)) or fewest
        return fewest

    def _closed(
        self, state: list[int], first: int, may_begin: set[int], num_known: int
    ) -> list[int] | None:
        """Of the smallest such set around a queue, those that may begin; None where they are no
        fewer than is known."""
        found: list[int] = []
        seen, left = {first}, [first]
        while left:
            queue = left.pop()
            if queue in may_begin:
                found.append(queue)
                if len(found) == num_known:
                    return None
                more = self._rivals(state, queue)
            else:
                more = self._hindrances(state, queue)
            for other in more:
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return found

    def _rivals(self, state: list[int], queue: int) -> Sequence[int]:
        """Queues that can want a place on the device while the next operation of this one, which
        may begin, has one; none where there are places for all of them. Not even one that would end
        at once has no rivals: it might have waited for another that began in its place."""
        if self._device.in_host_order:
            return ()
        rivals = self._nodes[queue][state[queue] >> 1].rivals
        found = [other for other, gone in rivals if state[other] < gone]
        return found if len(found) >= self._device.num_places else ()

    def _hindrances(self, state: list[int], queue: int) -> Sequence[int]:
        """Queues of which one has to go on before the next operation of this one may begin, or
        before it ends if it has begun."""
        now = state[queue]
        node = self._nodes[queue][now >> 1]
        if now & 1:
            return [next(other for other, begun in node.meets if state[other] < begun)]
        for other, least in node.needs:
            if state[other] < least:
                return [other]
        return [other for other in self._queues_of[self._rank_of[queue]] if state[other] & 1]

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
