# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the choice of who sends what several ranks hold to those who want it."""

from collections.abc import Collection, Iterable, Sequence

Holders = tuple[int, ...]
"""Global ranks that all hold, or can gather, the same tensor, in the order of their group."""


class Routes:
    """Routes of tensors: from which holder each receiver takes one.

    A receiver that is a holder takes its own. Another takes that of the holder whose place among
    the holders is the receiver's place among its own replicas: where all ranks receive, every
    copy of the model supplies itself, and no holder serves two of them while another serves none.

    receivers: global ranks that want all tensors.
    replicas: groups of global ranks that hold the same part of a model; each rank is in one.
    """

    def __init__(self, receivers: Iterable[int], replicas: Iterable[Holders]):
        self.receivers = tuple(sorted(receivers))
        self._place = {
            rank: (place, len(group)) for group in replicas for place, rank in enumerate(group)
        }
        self._sources: dict[Holders, dict[int, int]] = {}

    def sources(self, holders: Holders) -> dict[int, int]:
        """The holder that each receiver takes a tensor of `holders` from, by receiver."""
        if holders not in self._sources:
            self._sources[holders] = {
                receiver: self._source(holders, receiver) for receiver in self.receivers
            }
        return self._sources[holders]

    def _source(self, holders: Holders, receiver: int) -> int:
        if receiver in holders:
            return receiver
        place, count = self._place[receiver]
        return holders[place * len(holders) // count]

    def serves(self, holders: Holders, ranks: Collection[int]) -> bool:
        """Whether one of `ranks` is a source for anyone."""
        return not set(self.sources(holders).values()).isdisjoint(ranks)


def sharing_block(holders: Sequence[int], rank: int, shard_size: int) -> Sequence[int]:
    """Return the holders that share one copy of a state with `rank`, and gather it together."""
    start = holders.index(rank) // shard_size * shard_size
    return holders[start : start + shard_size]
