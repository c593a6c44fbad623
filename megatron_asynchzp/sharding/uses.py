# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the record of what a step uses, in order: what the step before did is what the next one is
expected to do.
"""

from collections.abc import Sequence


class Uses[User]:
    """The sequence of uses of one step, forward and backward of all micro-batches.

    A step that departs from the one before it (a module skipped, an early exit) is followed no
    further until the next one begins, whose record it is.

    expected: what the step before used.
    used: what this one has used so far.
    is_followed: whether that is the beginning of what was expected.
    """

    def __init__(self) -> None:
        self.expected: list[User] = []
        self.used: list[User] = []
        self.is_followed = True

    def restart(self) -> bool:
        """A step begins; the one before it, if it used anything, is the record from now on.

        Returns whether the record is another one than before.
        """
        self.is_followed = True
        if not self.used:
            return False
        before, self.expected, self.used = self.expected, self.used, []
        return before != self.expected

    def visit(self, user: User) -> User | None:
        """`user` has its turn now. Returns who was expected, at the first departure only."""
        position = len(self.used)
        self.used.append(user)
        if not self.is_followed:
            return None
        expected = self.expected[position] if position < len(self.expected) else None
        self.is_followed = expected == user
        return None if self.is_followed else expected

    def upcoming(self, most: int) -> Sequence[User]:
        """The next uses, as far as they are known, at most that many."""
        position = len(self.used)
        return self.expected[position : position + most] if self.is_followed else ()
