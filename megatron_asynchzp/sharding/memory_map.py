# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns who holds which part of one memory, and who used each last. Knows addresses alone."""

from bisect import insort
from collections.abc import Sequence

Extent = tuple[int, int]
"""Half-open range of addresses, in bytes."""


class MemoryMap[User]:
    """Parts of one memory that are held in turn.

        | root | layer 3 |       free       | layer 2 |

    What is taken is the first free part that is large enough, seen from one end: those of different
    size that ask for opposite ends leave what is free in one piece between them. Everything follows
    from the order of calls alone, which is the same on every rank; so which part it is, and when it
    is free, never depends on timing.

    nbytes: how much there is, held or free. User: what stands for a use of a part: an event, say.
    """

    def __init__(self, nbytes: int = 0):
        self.nbytes = 0
        self._regions: list[Extent] = []
        self._held: list[Extent] = []  # sorted
        self._last_users: list[tuple[Extent, User]] = []
        if nbytes:
            self.grow(nbytes)

    @property
    def num_held(self) -> int:
        """Parts that are held now."""
        return len(self._held)

    def grow(self, nbytes: int) -> Extent:
        """So much more, for good: more is needed at once than there was. Returns where it is."""
        region = (self.nbytes, self.nbytes + nbytes)
        self._regions.append(region)
        self.nbytes = region[1]
        return region

    def reserve(self, nbytes: int) -> Extent:
        """So much more, which `take` never finds: for seats."""
        region = self.grow(nbytes)
        self._regions.remove(region)
        return region

    def take(self, nbytes: int, from_top: bool = False) -> Extent | None:
        """Hold `nbytes`, seen from one end; None where no free part is large enough."""
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return None
        extent = (start, start + nbytes)
        insort(self._held, extent)
        return extent

    def give_back(self, extent: Extent, last_user: User | None = None) -> None:
        """Hold `extent` no longer; it may be written again once `last_user` has ended."""
        if extent not in self._held:
            raise RuntimeError("a place was given back twice")
        self._held.remove(extent)
        if last_user is not None:
            self.note_user(extent, last_user)

    def note_user(self, extent: Extent, user: User) -> None:
        """`user` is the last one of `extent`."""
        self._last_users.append((extent, user))

    def claim(self, extent: Extent) -> list[User]:
        """Return the last users of any part of `extent`, forgotten as far as it goes: what writes
        there later comes after its next user."""
        users: list[User] = []
        rest: list[tuple[Extent, User]] = []
        for used, user in self._last_users:
            if overlap(used, extent):
                users.append(user)
                rest += [(cut, user) for cut in _without(used, extent)]
            else:
                rest.append((used, user))
        self._last_users = rest
        return users

    def leaves_room(
        self,
        nbytes: int,
        from_top: bool,
        beside: Sequence[Extent],
        more: Sequence[tuple[int, bool]],
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
    regions: Sequence[Extent], held: Sequence[Extent], nbytes: int, from_top: bool = False
) -> int | None:
    """Find where the first free part of `regions` that has `nbytes` begins, seen from one end; seen
    from the upper one, where its last `nbytes` begin. None without one.

    held: what is taken, sorted, each within a region.
    """
    free: list[Extent] = []
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


def overlap(one: Extent, other: Extent) -> bool:
    """Whether the two have an address in common."""
    return one[0] < other[1] and other[0] < one[1]


def _without(extent: Extent, taken: Extent) -> list[Extent]:
    """Return the parts of `extent` outside `taken`, which overlaps it; no empty ones."""
    rest = (extent[0], taken[0]), (taken[1], extent[1])
    return [part for part in rest if part[0] < part[1]]
