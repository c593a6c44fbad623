# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses which of a tensor's holders sends it to each receiver."""

from collections.abc import Collection, Iterable, Sequence

Holders = tuple[int, ...]
"""Global ranks that hold, or can gather, the same tensor, in the order of their group."""


class Routes:
    """The holder from which each receiver takes a tensor.

    A receiver that holds the tensor takes its own. Any other takes it from the holder whose place
    among the holders is the receiver's among its replicas. So if all ranks receive, every copy of
    the model supplies itself, and the holders serve equally many receivers. Ranks are global; each
    is in one group of `replicas`, which hold the same part of a model.
    """

    def __init__(self, receivers: Iterable[int], replicas: Iterable[Holders]):
        self.receivers = tuple(sorted(receivers))
        self._place = {
            rank: (place, len(group)) for group in replicas for place, rank in enumerate(group)
        }
        self._sources: dict[Holders, dict[int, int]] = {}

    def sources(self, holders: Holders) -> dict[int, int]:
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
        return not set(self.sources(holders).values()).isdisjoint(ranks)


def sharing_block(holders: Sequence[int], rank: int, shard_size: int) -> Sequence[int]:
    """Return the holders that share a copy of a state with `rank`, which gather it together."""
    start = holders.index(rank) // shard_size * shard_size
    return holders[start : start + shard_size]
