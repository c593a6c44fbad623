# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns in which directions layers read gathered weights, from one step to the next.

[Note: directions] Some layers read codes of rows in forward and codes of columns in backward. A
gather brings the codes that layers read at the same place in the last step: of the k-th residence
of a unit, from its gather until its memory is free. If they read both, because the unit stayed
from forward to backward, if a layer is recomputed, or if there is no record, it brings bf16. A use
that does not fit gathers the unit again, in bf16.
"""

from enum import Enum


class Direction(Enum):
    """In which a layer reads a weight."""

    FORWARD = "forward"
    BACKWARD = "backward"


BOTH = frozenset(Direction)


class Directions[Unit]:
    """The directions of each residence of a unit in this training step, and in the last one."""

    def __init__(self) -> None:
        self._now: dict[Unit, list[set[Direction]]] = {}
        self._before: dict[Unit, list[set[Direction]]] = {}

    def restart(self) -> None:
        """Begin a training step; a step without uses is no record."""
        if self._now:
            self._before, self._now = self._now, {}

    def begin(self, unit: Unit) -> set[Direction]:
        """Begin a residence of `unit`; the result collects its directions."""
        read = set[Direction]()
        self._now.setdefault(unit, []).append(read)
        return read

    def expected(self, unit: Unit) -> Direction | None:
        """Return the only direction of the residence that comes next; None: both."""
        number, before = len(self._now.get(unit, ())), self._before.get(unit, ())
        read = before[number] if number < len(before) else BOTH
        return next(iter(read)) if len(read) == 1 else None
