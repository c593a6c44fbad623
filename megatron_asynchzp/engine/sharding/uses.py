# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records what a step uses, in order."""

from collections.abc import Sequence


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
