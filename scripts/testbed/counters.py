# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What was counted: operations, wire bytes and busy seconds per group and kind of operation."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True)
class Tally:
    """What operations of this rank cost.

    wire_nbytes: payload sent to other ranks; node_nbytes: the part that left the node; busy_s: for
    which the group's thread was at work; work of two groups may overlap.
    """

    operations: int = 0
    wire_nbytes: int = 0
    node_nbytes: int = 0
    busy_s: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Tally)))


class Account(NamedTuple):
    """What a tally belongs to: a group (its description and global ranks), a kind of operation."""

    group: str
    kind: str


Ledger = dict[Account, Tally]


class Counters:
    """Tallies of one process, added to by the threads of all groups."""

    def __init__(self):
        self._mutex = threading.Lock()
        self._ledger: Ledger = {}

    def add(self, account: Account, tally: Tally) -> None:
        """Count finished operations."""
        with self._mutex:
            self._ledger[account] = self._ledger.get(account, Tally()) + tally

    def snapshot(self) -> Ledger:
        """All tallies since the process began; operations in flight are not in it yet."""
        with self._mutex:
            return dict(self._ledger)

    def since(self, before: Ledger) -> Ledger:
        """What was added after the snapshot `before`."""
        now = self.snapshot()
        gained = {account: tally - before.get(account, Tally()) for account, tally in now.items()}
        return {account: tally for account, tally in gained.items() if tally.operations}


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    return sum(tallies, Tally())
