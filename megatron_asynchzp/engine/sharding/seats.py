# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Assigns seats: fixed addresses of gathered parameters that CUDA graphs read.

A unit has one seat for both directions and all micro-batches, and shares it with every n-th unit of
its size, where n is the number of such units in memory at a time:

    layer  0 1 2 3 4        one ahead, so n = 2
    seat   0 1 0 1 0
"""

from collections import Counter
from collections.abc import Sequence

from megatron_asynchzp.engine.sharding.memory_map import Extent


def assign_seats(units: Sequence[tuple[str, int]], num_ahead: int) -> list[Extent]:
    """Return the seat of each unit (layer, bytes), in the order of use, counted from 0.

    A layer's units are needed at the same time, and `num_ahead` layers of each size ahead.
    """
    in_layer, in_class = Counter[tuple[str, int]](), Counter[tuple[int, int]]()
    starts: dict[tuple[int, int, int], int] = {}
    seats: list[Extent] = []
    end = 0
    for layer, nbytes in units:
        kind = (nbytes, in_layer[layer, nbytes])
        in_layer[layer, nbytes] += 1
        seat = (*kind, in_class[kind] % (num_ahead + 1))
        in_class[kind] += 1
        if seat not in starts:
            starts[seat], end = end, end + nbytes
        seats.append((starts[seat], starts[seat] + nbytes))
    return seats


def seats_nbytes(seats: Sequence[Extent]) -> int:
    return max((stop for _, stop in seats), default=0)
