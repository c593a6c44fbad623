# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns who holds which part of one memory, and who used each last. Knows addresses alone."""

from bisect import insort
from collections.abc import Sequence

Span = tuple[int, int]
"""Half-open range of addresses, in bytes."""


class Spans[User]:
    """Parts of one memory that are held in turn.

        | root | layer 3 |       free       | layer 2 |

    What is taken is the first free part that is large enough, seen from one end: those of different
    size that ask for opposite ends leave what is free in one piece between them. Everything follows
    from the order of calls alone, which is the same on every rank; so which part it is, and when it
    is free, never depends on timing.

    nbytes: how much there is. User: what stands for a use of a part: an event, say.
    """

    def __init__(self, nbytes: int = 0):
        self._regions: list[Span] = []
        self._held: list[Span] = []  # sorted
        self._last_users: list[tuple[Span, User]] = []
        if nbytes:
            self.grow(nbytes)

    @property
    def nbytes(self) -> int:
        """Of all parts together, held or free."""
        return self._regions[-1][1] if self._regions else 0

    @property
    def num_held(self) -> int:
        """Parts that are held now."""
        return len(self._held)

    def grow(self, nbytes: int) -> Span:
        """So much more, for good: more is needed at once than there was. Returns where it is."""
        region = (self.nbytes, self.nbytes + nbytes)
        self._regions.append(region)
        return region

    def take(self, nbytes: int, from_top: bool = False) -> Span | None:
        """Hold `nbytes`, seen from one end; None where no free part is large enough."""
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return None
        span = (start, start + nbytes)
        insort(self._held, span)
        return span

    def give_back(self, span: Span, last_user: User | None = None) -> None:
        """Hold `span` no longer; it may be written again once `last_user` has ended."""
        if span not in self._held:
            raise RuntimeError("a place was given back twice")
        self._held.remove(span)
        if last_user is not None:
            self.note_user(span, last_user)

    def note_user(self, span: Span, user: User) -> None:
        """`user` is the last one of `span`."""
        self._last_users.append((span, user))

    def hand_over(self, span: Span) -> list[User]:
        """Those who used a part of `span` last, and are forgotten as far as it goes: whoever writes
        there later comes after its next user."""
        users: list[User] = []
        rest: list[tuple[Span, User]] = []
        for used, user in self._last_users:
            if overlap(used, span):
                users.append(user)
                rest += [(cut, user) for cut in _without(used, span)]
            else:
                rest.append((used, user))
        self._last_users = rest
        return users

    def leaves_room(
        self, nbytes: int, from_top: bool, beside: Sequence[Span], more: Sequence[tuple[int, bool]]
    ) -> bool:
        """Whether after `take` of so many bytes parts for all of `more`, each (nbytes, from_top),
        could be found one after another if nothing but that one and `beside` were held."""
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return False
        taken = sorted([(start, start + nbytes), *beside])
        for size, is_from_top in more:
            start = first_fit(self._regions, taken, size, is_from_top)
            if start is None:
                return False
            insort(taken, (start, start + size))
        return True


def first_fit(
    regions: Sequence[Span], held: Sequence[Span], nbytes: int, from_top: bool = False
) -> int | None:
    """Where the first free part of `regions` that has `nbytes` begins, seen from one end; seen from
    the upper one, where its last `nbytes` begin. None without one.

    held: what is taken, sorted, each within a region.
    """
    free: list[Span] = []
    for start, stop in regions:
        for taken in held:
            if start <= taken[0] < stop:
                free.append((start, taken[0]))
                start = taken[1]
        free.append((start, stop))
    for start, stop in reversed(free) if from_top else free:
        if stop > start and stop - start >= nbytes:
            return stop - nbytes if from_top else start
    return None


def overlap(one: Span, other: Span) -> bool:
    """Whether the two have an address in common."""
    return one[0] < other[1] and other[0] < one[1]


def _without(span: Span, taken: Span) -> list[Span]:
    """What is left of `span`, which overlaps; no empty parts."""
    rest = (span[0], taken[0]), (taken[1], span[1])
    return [part for part in rest if part[0] < part[1]]
