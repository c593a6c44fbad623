# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what stays in memory from one use to a later one, within a budget: gather once, reduce once,
for several micro-batches (paper, section 4.3.2).
"""

from collections.abc import Callable, Sequence


def kept_gaps[User](
    uses: Sequence[User], nbytes_of: Callable[[User], int], budget: int
) -> frozenset[int]:
    """Which users to keep in memory from one use to their next.

    uses: who uses its memory, in order; a user may occur many times; budget: bytes that may be
    kept beside those of the user whose turn it is. Returns the positions in `uses` after which a
    user is kept until its next use.

    This is Belady's rule, looked at from the gaps between two uses of one user: where more is kept
    than the budget allows, what is used last in the future goes. Of users of equal size no choice
    keeps more. A gap with nothing in between takes no memory, and is always kept.
    """
    next_use: dict[User, int] = {}
    gap_ends: dict[int, int] = {}
    for position in range(len(uses) - 1, -1, -1):
        if uses[position] in next_use:
            gap_ends[position] = next_use[uses[position]]
        next_use[uses[position]] = position
    kept: set[int] = set()
    open_gaps: dict[int, int] = {}  # start: end
    nbytes = 0
    for position, user in enumerate(uses):
        # What lies open while `user` has its turn: not the gap that ends with it, nor the one that
        # begins with it.
        for start in [start for start, end in open_gaps.items() if end == position]:
            del open_gaps[start]
            nbytes -= nbytes_of(user)
            kept.add(start)
        while nbytes > budget:
            last = max(open_gaps, key=open_gaps.__getitem__)
            del open_gaps[last]
            nbytes -= nbytes_of(uses[last])
        if position in gap_ends:
            open_gaps[position] = gap_ends[position]
            nbytes += nbytes_of(user)
    return frozenset(kept)
