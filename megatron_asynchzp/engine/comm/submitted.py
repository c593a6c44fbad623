# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records the tasks submitted to a driver, in order, so that ranks can compare them."""

import zlib
from collections import deque
from collections.abc import Iterable

from megatron_asynchzp.engine.failure.standstill import LENGTH

_OF_MICRO_BATCHES = ("gather ", "reduce ")

# `shorten` folds a record with more entries.
_LONG_RECORD = 1000


def hash_of(entries: Iterable[str]) -> int:
    value = 0
    for entry in entries:
        value = zlib.crc32(entry.encode(), value)
    return value


def crosses_groups(entry: str) -> bool:
    """Return whether all ranks of a sharding group must submit this entry at the same place.

    [Note: unequal micro-batches] Gathers and reductions of a micro-batch connect only the ranks of
    a group of max(P, G) ranks. So these groups may take different numbers of micro-batches in a
    step. They meet once a step, when each unit's gradient and parameters cross them.
    """
    return not entry.startswith(_OF_MICRO_BATCHES)


class Submitted:
    """The record of submitted tasks."""

    def __init__(self) -> None:
        self.entries: list[str] = []  # "lane unit" of each task, until `drain`
        # The last (number, entry), from number 1: of all tasks, and of those that cross groups.
        self.recent = deque[tuple[int, str]](maxlen=LENGTH), deque[tuple[int, str]](maxlen=LENGTH)

    def add(self, entry: str) -> None:
        self.entries.append(entry)
        for record in self.recent if crosses_groups(entry) else self.recent[:1]:
            record.append((record[-1][0] + 1 if record else 1, entry))

    def drain(self) -> list[str]:
        entries, self.entries = self.entries, []
        return entries

    def shorten(self) -> None:
        """Fold the entries within groups into one if there are many.

        An evaluation may run any number of forwards without a comparison.
        """
        if len(self.entries) > _LONG_RECORD:
            crossing = [entry for entry in self.entries if crosses_groups(entry)]
            folded = f"gather of {len(self.entries)} with hash {hash_of(self.entries):08x}"
            self.entries = [*crossing, folded]
