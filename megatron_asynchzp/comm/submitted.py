# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the record of what a driver was handed, in its order, which ranks compare."""

import zlib
from collections import deque
from collections.abc import Iterable

from megatron_asynchzp.failure.standstill import LENGTH

_OF_MICRO_BATCHES = ("gather ", "reduce ")

# More entries than this are folded into one where the record is shortened.
_LONG_RECORD = 1000


def hash_of(entries: Iterable[str]) -> int:
    """Return the CRC-32 of what was submitted, in its order; the same in every process."""
    value = 0
    for entry in entries:
        value = zlib.crc32(entry.encode(), value)
    return value


def crosses_groups(entry: str) -> bool:
    """Whether all ranks of a sharding group must submit this at the same place.

    [Note: unequal micro-batches] What a micro-batch needs, gathers and reductions, connects the
    ranks of one group of max(P, G) ranks alone. So these groups may take different numbers of
    micro-batches in a step, and meet where each unit's gradient and parameters cross them, once a
    step.
    """
    return not entry.startswith(_OF_MICRO_BATCHES)


class Submitted:
    """Record of the tasks that were submitted.

    entries: "lane unit" of each task, until the comparison of orders takes them.
    recent: the last of them with the place of each, from 1; of all tasks, and of those that cross
        groups.
    """

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.recent = deque[tuple[int, str]](maxlen=LENGTH), deque[tuple[int, str]](maxlen=LENGTH)

    def add(self, entry: str) -> None:
        """A task with this name was submitted."""
        self.entries.append(entry)
        for record in self.recent if crosses_groups(entry) else self.recent[:1]:
            record.append((record[-1][0] + 1 if record else 1, entry))

    def take(self) -> list[str]:
        """The entries since the last call."""
        taken, self.entries = self.entries, []
        return taken

    def shorten(self) -> None:
        """A forward of an evaluation begins, which may be any number of them without a comparison:
        fold what does not cross groups into one entry where it is long."""
        if len(self.entries) > _LONG_RECORD:
            crossing = [entry for entry in self.entries if crosses_groups(entry)]
            folded = f"gather of {len(self.entries)} with hash {hash_of(self.entries):08x}"
            self.entries = [*crossing, folded]
