# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The sub-samples of a step, of different lengths and on different numbers of ranks, on paper.

Ranks that gather or reduce together run equally many micro-batches, so fillers follow those of a
rank that has fewer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice

Routes = Sequence[Sequence[Sequence[int]]]
"""For each group of sub-samples without a barrier in it, and each rank, the numbers of its own."""


def evened(routes: Routes, block: int) -> list[list[list[int]]]:
    """Fill the lists of every `block` consecutive ranks to their longest.

    Each filler has a number of its own, below 0. No list of the last group stays empty, because
    each rank reduces after the last sub-sample of that group.
    """
    fillers = count(-1, -1)
    filled: list[list[list[int]]] = []
    for group in routes:
        least = 1 if len(filled) == len(routes) - 1 else 0
        filled.append([])
        for first in range(0, len(group), block):
            ranks = group[first : first + block]
            longest = max(least, *map(len, ranks))
            filled[-1] += [[*mine, *islice(fillers, longest - len(mine))] for mine in ranks]
    return filled


@dataclass(frozen=True)
class RoutedStep:
    """A step whose sub-samples go along `routes`."""

    routes: Routes
    lengths: Sequence[int]  # tokens, by the number of a sub-sample
    block: int  # so many consecutive ranks gather or reduce together
    micro_batch_s: Callable[[int, int], float]  # seconds, by tokens and ranks

    @cached_property
    def _filled(self) -> list[list[list[int]]]:
        return evened(self.routes, self.block)

    @property
    def longest(self) -> int:
        """The micro-batches of the rank that has most."""
        return max(sum(map(len, lists)) for lists in zip(*self._filled, strict=True))

    @property
    def filler_share(self) -> float:
        """The part of all micro-batches of all ranks that are fillers."""
        are_fillers = [number < 0 for group in self._filled for own in group for number in own]
        return sum(are_fillers) / len(are_fillers)

    @property
    def step_s(self) -> float:
        """The seconds of all micro-batches; after a group all ranks wait for each other."""
        return sum(max(self._block_s(group)) for group in self._filled)

    def _block_s(self, group: Sequence[Sequence[int]]) -> Iterator[float]:
        """Yield the seconds of each block, which waits for its slowest rank in each micro-batch."""
        seconds = {
            number: self.micro_batch_s(self.lengths[number] if number >= 0 else 1, num_ranks)
            for number, num_ranks in Counter(chain.from_iterable(group)).items()
        }
        for first in range(0, len(group), self.block):
            turns = zip(*group[first : first + self.block], strict=True)
            yield sum(max(seconds[number] for number in turn) for turn in turns)
