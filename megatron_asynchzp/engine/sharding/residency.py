# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records what a step uses, and decides what stays until a later use (paper, section 4.3.2)."""

from collections.abc import Callable, Collection, Sequence


class Uses[User]:
    """The sequence of a step's uses, forward and backward of all micro-batches.

    The next step is expected to repeat it. After a difference (a skipped module, an early exit) the
    record predicts nothing until a new step begins.
    """

    def __init__(self) -> None:
        self.expected: list[User] = []  # the uses of the step before
        self.used: list[User] = []  # the uses of this step so far
        self.is_followed = True  # whether `expected` begins with `used`

    def restart(self) -> bool:
        """Begin a step; return whether the record changed. A step without uses is no record."""
        self.is_followed = True
        if not self.used:
            return False
        before, self.expected, self.used = self.expected, self.used, []
        return before != self.expected

    def visit(self, user: User) -> User | None:
        """Record a use; return the expected user at the step's first departure."""
        position = len(self.used)
        self.used.append(user)
        if not self.is_followed:
            return None
        expected = self.expected[position] if position < len(self.expected) else None
        self.is_followed = expected == user
        return None if self.is_followed else expected

    def upcoming(self, most: int) -> Sequence[User]:
        """Return at most `most` of the next uses, as far as they are known."""
        position = len(self.used)
        return self.expected[position : position + most] if self.is_followed else ()


def kept_gaps[User](
    uses: Sequence[User], nbytes_of: Callable[[User], int], budget: int, counts_own: bool = False
) -> frozenset[int]:
    """Return the positions in `uses` after which the user stays in memory until its next use.

    This is Belady's rule on the gaps between two uses of a user: above the budget (bytes), drop the
    gap that ends last. For users of equal size this is optimal. A gap between two successive uses
    takes no memory, unless `counts_own`, which counts the kept memory of the current user, too.
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
    """Decides from the last step which users the next step keeps.

    The chunks of a rank share one object, as they share its memory. After its first difference from
    the previous step, a step keeps nothing more. With a budget of 0 nothing is kept until
    `enlarge`.
    """

    def __init__(self, budget: int, nbytes_of: Callable[[User], int], counts_own: bool = False):
        self.budget, self._nbytes_of, self._counts_own = budget, nbytes_of, counts_own
        self._uses = Uses[User]()
        self._last: dict[User, int] = {}  # position of each user's last use in this step
        self._gaps: frozenset[int] = frozenset()
        self._num_hits = 0
        self.planned_nbytes = 0  # the most that a step keeps at a time
        self.num_hits = 0  # uses of the last step whose memory was kept

    def restart(self) -> None:
        """Begin a step; the step before it becomes the record, unless it used nothing."""
        if not self._uses.used:
            return
        self.num_hits, self._num_hits = self._num_hits, 0
        if self._uses.restart():
            self._plan()
        self._last.clear()

    @property
    def record(self) -> Sequence[User]:
        """The uses of the last step that used anything, for `expect`."""
        return self._uses.used or self._uses.expected

    def expect(self, uses: Sequence[User]) -> None:
        """Set the last step's record before the first step of a resumed run."""
        self._uses.expected = list(uses)
        self._plan()

    def enlarge(self, nbytes: int) -> None:
        self.budget += nbytes
        self._plan()

    def _plan(self) -> None:
        if not self.budget:
            return
        plan = self._uses.expected, self._nbytes_of
        self._gaps = kept_gaps(*plan, self.budget, self._counts_own)
        self.planned_nbytes = most_kept_nbytes(*plan, self._gaps, self._counts_own)

    def visit(self, user: User) -> None:
        if self._uses.is_followed:
            self._num_hits += self._last.get(user) in self._gaps
        self._last[user] = len(self._uses.used)
        self._uses.visit(user)

    def keeps(self, user: User) -> bool:
        return self._uses.is_followed and self._last.get(user) in self._gaps


def most_kept_nbytes[User](
    uses: Sequence[User],
    nbytes_of: Callable[[User], int],
    gaps: Collection[int],
    counts_own: bool = False,
) -> int:
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
