# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Decides which units keep optimizer states on the host, and the memory to update them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from megatron_asynchzp.engine.sharding.layout import round_up

NUM_PLACES = 2
"""Units whose states are on the device: one is copied while the other is updated."""

_ALIGNMENT = 512  # bytes


def num_on_host(numels: Sequence[int], fraction: float) -> int:
    least = fraction * sum(numels)
    sums = accumulate(numels, initial=0)
    return next(num for num, numel in enumerate(sums) if numel >= least or num == len(numels))


def aligned_nbytes(nbytes: int) -> int:
    """Round `nbytes` up to the distance of tensors that follow one another in a copy."""
    return round_up(nbytes, _ALIGNMENT)


def room_nbytes(units_nbytes: Iterable[float]) -> float:
    """Return the device memory to update units with `units_nbytes` of states on the host."""
    return NUM_PLACES * max(units_nbytes, default=0)
