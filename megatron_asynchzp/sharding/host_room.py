# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which units hold their optimizer states on the host, and the room on the device in which
these are updated. Needs no tensors.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from megatron_asynchzp.sharding.layout import round_up

NUM_PLACES = 2
"""For the states of so many units at a time: one comes, or goes, while the other is updated."""

_ALIGNMENT = 512  # bytes


def num_on_host(numels: Sequence[int], fraction: float) -> int:
    """How many units, from the first one on, have `fraction` of all elements, or the least more.

    numels: elements of each unit's optimizer shard.
    """
    asked = fraction * sum(numels)
    reached = accumulate(numels, initial=0)
    return next(num for num, numel in enumerate(reached) if numel >= asked or num == len(numels))


def aligned_nbytes(nbytes: int) -> int:
    """Round `nbytes` up to what they take where others follow, in a place or in one copy."""
    return round_up(nbytes, _ALIGNMENT)


def room_nbytes(units_nbytes: Iterable[float]) -> float:
    """Bytes on the device for the update of units whose states on the host take `units_nbytes`."""
    return NUM_PLACES * max(units_nbytes, default=0)
