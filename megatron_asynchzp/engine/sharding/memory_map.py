# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tracks which addresses of a memory are held, and the last user of each."""

from bisect import insort
from collections.abc import Sequence

Extent = tuple[int, int]
"""Half-open range of addresses, in bytes."""


class MemoryMap[User]:
    """Parts of a memory that are held in turn; `User` stands for a use, such as an event.

        | root | layer 3 |       free       | layer 2 |

    `hold` searches free parts from the bottom or from the top and returns the first that is large
    enough. Users of different sizes start at opposite ends, so free memory stays in one piece. The
    result depends on the order of calls alone.
    """

    def __init__(self, nbytes: int = 0):
        self.nbytes = 0  # held and free
        self._regions: list[Extent] = []
        self._held: list[Extent] = []  # sorted
        self._last_users: list[tuple[Extent, User]] = []
        if nbytes:
            self.grow(nbytes)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def grow(self, nbytes: int) -> Extent:
        region = (self.nbytes, self.nbytes + nbytes)
        self._regions.append(region)
        self.nbytes = region[1]
        return region

    def extend(self, nbytes: int) -> Extent:
        """Grow within a step, which some memory cannot."""
        return self.grow(nbytes)

    def reserve(self, nbytes: int) -> Extent:
        """Add `nbytes` that `hold` never returns, for seats, and return their extent."""
        region = self.grow(nbytes)
        self._regions.remove(region)
        return region

    def hold(self, nbytes: int, from_top: bool = False) -> Extent | None:
        """Hold `nbytes` of the first free part that is large enough; return None without one."""
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return None
        extent = (start, start + nbytes)
        insort(self._held, extent)
        return extent

    def release(self, extent: Extent, last_user: User | None = None) -> None:
        """Stop holding `extent`; it may be written again when `last_user` has ended."""
        if extent not in self._held:
            raise RuntimeError(f"the bytes {extent} were released twice")
        self._held.remove(extent)
        if last_user is not None:
            self.note_last_user(extent, last_user)

    def note_last_user(self, extent: Extent, user: User) -> None:
        self._last_users.append((extent, user))

    def forget_users(self) -> None:
        self._last_users.clear()

    def pop_last_users(self, extent: Extent) -> list[User]:
        """Return and forget the last users of `extent`: the caller writes there after them."""
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
        neighbours: Sequence[Extent],
        more: Sequence[tuple[int, bool]],
    ) -> bool:
        """Return whether `hold(nbytes, from_top)` leaves room for all (nbytes, from_top) in `more`.

        Besides the new part, only `neighbours` count as held.
        """
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return False
        held = sorted([(start, start + nbytes), *neighbours])
        for size, is_from_top in more:
            start = first_fit(self._regions, held, size, is_from_top)
            if start is None:
                return False
            insort(held, (start, start + size))
        return True


def first_fit(
    regions: Sequence[Extent], held: Sequence[Extent], nbytes: int, from_top: bool = False
) -> int | None:
    """Return the start of the first `nbytes` that are free in `regions`, or None.

    With `from_top` they are the last `nbytes` of the highest free part that is large enough.
    `held` is sorted, each extent within a region.
    """
    free: list[Extent] = []
    for start, stop in regions:
        for extent in held:
            if start <= extent[0] < stop:
                free.append((start, extent[0]))
                start = extent[1]
        free.append((start, stop))
    for start, stop in reversed(free) if from_top else free:
        if stop > start and stop - start >= nbytes:
            return stop - nbytes if from_top else start
    return None


def overlap(left: Extent, right: Extent) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def _without(extent: Extent, hole: Extent) -> list[Extent]:
    rest = (extent[0], hole[0]), (hole[1], extent[1])
    return [part for part in rest if part[0] < part[1]]
