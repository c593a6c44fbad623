# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what stays in memory from one use to a later one, within a budget: gather once, reduce once,
for several micro-batches (paper, section 4.3.2).
"""

from collections.abc import Callable, Collection, Sequence

from megatron_asynchzp.sharding.uses import Uses


def kept_gaps[User](
    uses: Sequence[User], nbytes_of: Callable[[User], int], budget: int, counts_own: bool = False
) -> frozenset[int]:
    """Which users to keep in memory from one use to their next.

    uses: who uses its memory, in order; a user may occur many times.
    budget: bytes that may be kept.
    counts_own: whether what the user whose turn it is had kept is a part of them, or has a place of
        its own.

    Returns the positions in `uses` after which a user is kept until its next use.

    This is Belady's rule, looked at from the gaps between two uses of one user: where more is kept
    than the budget allows, what is used last in the future goes. Of users of equal size no choice
    keeps more. A gap with nothing in between takes no memory unless a user's own counts.
    """
    next_use: dict[User, int] = {}
    gap_ends: dict[int, int] = {}
    for position in range(len(uses) - 1, -1, -1):
        if uses[position] in next_use:
            gap_ends[position] = next_use[uses[position]]
        next_use[uses[position]] = position
    kept: set[int] = set()
    open_gaps: dict[User, tuple[int, int]] = {}  # end, start
    nbytes = 0

    def drop(user: User) -> int:
        nonlocal nbytes
        nbytes -= nbytes_of(user)
        return open_gaps.pop(user)[1]

    def shrink() -> None:
        while nbytes > budget:
            drop(max(open_gaps, key=open_gaps.__getitem__))

    for position, user in enumerate(uses):
        if counts_own:
            shrink()
        if user in open_gaps:
            kept.add(drop(user))
        shrink()
        if position in gap_ends:
            open_gaps[user] = gap_ends[position], position
            nbytes += nbytes_of(user)
    return frozenset(kept)


class Residency[User]:
    """Decides from the last step what the next one keeps. The chunks of a rank share one, as they
    share its memory.

    Everything follows from the order of uses, which is the same on every rank. A step that departs
    from the one before keeps nothing more from there on.

    budget: bytes that may be kept, 0 for one that keeps nothing yet.
    nbytes_of: those of a user.
    counts_own: see kept_gaps.
    planned_nbytes: the most that a step keeps at a time.
    num_found: uses of the last step that found their memory kept.
    """

    def __init__(self, budget: int, nbytes_of: Callable[[User], int], counts_own: bool = False):
        self.budget, self._nbytes_of, self._counts_own = budget, nbytes_of, counts_own
        self._uses = Uses[User]()
        self._last: dict[User, int] = {}
        self._gaps: frozenset[int] = frozenset()
        self._num_found = 0
        self.planned_nbytes = self.num_found = 0

    def restart(self) -> None:
        """A step begins; the one before it, if it used anything, is the record from now on."""
        if not self._uses.used:
            return
        self.num_found, self._num_found = self._num_found, 0
        if self._uses.restart():
            self._plan()
        self._last.clear()

    @property
    def record(self) -> Sequence[User]:
        """The uses of the last step that used anything, for `expect` of another process."""
        return self._uses.used or self._uses.expected

    def expect(self, uses: Sequence[User]) -> None:
        """Before the first step of a run that goes on: `uses` was the last step's record."""
        self._uses.expected = list(uses)
        self._plan()

    def enlarge(self, nbytes: int) -> None:
        """From the next use on, between two steps, so much more may be kept."""
        self.budget += nbytes
        self._plan()

    def _plan(self) -> None:
        if not self.budget:
            return
        plan = self._uses.expected, self._nbytes_of
        self._gaps = kept_gaps(*plan, self.budget, self._counts_own)
        self.planned_nbytes = most_kept_nbytes(*plan, self._gaps, self._counts_own)

    def visit(self, user: User) -> None:
        """`user` has its turn now."""
        if self._uses.is_followed:
            self._num_found += self._last.get(user) in self._gaps
        self._last[user] = len(self._uses.used)
        self._uses.visit(user)

    def keeps(self, user: User) -> bool:
        """Whether `user`, whose turn is over, is kept until its next one."""
        return self._uses.is_followed and self._last.get(user) in self._gaps


def most_kept_nbytes[User](
    uses: Sequence[User],
    nbytes_of: Callable[[User], int],
    gaps: Collection[int],
    counts_own: bool = False,
) -> int:
    """The most bytes that lie in `gaps`, as kept_gaps returns them, during somebody's turn."""
    most = nbytes = 0
    kept: set[User] = set()
    for position, user in enumerate(uses):
        own = nbytes_of(user) if user in kept else 0
        kept.discard(user)
        nbytes -= own
        most = max(most, nbytes + own * counts_own)
        if position in gaps:
            kept.add(user)
            nbytes += nbytes_of(user)
    return most
