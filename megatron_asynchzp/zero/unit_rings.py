# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the rings of one kind of memory, one per size of unit. Must not know what is in a slot."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megatron_asynchzp.comm.ring import BufferRing, Slot
from megatron_asynchzp.zero.unit import HZPUnit


class UnitRings:
    """Slots for the units that need some: `max_slots` per size, never more than there are units.

    new_slot: allocates one that fits the unit and all that are as large.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        needs_slot: Callable[[HZPUnit], bool],
        max_slots: int,
        new_slot: Callable[[HZPUnit], Slot],
    ):
        self._rings: dict[tuple, BufferRing] = {}
        num_equal = Counter(map(_size_of, units))
        for unit in filter(needs_slot, units):
            size = _size_of(unit)
            if size not in self._rings:
                num_slots = min(num_equal[size], max_slots)
                self._rings[size] = BufferRing(num_slots, partial(new_slot, unit))

    def __iter__(self) -> Iterator[BufferRing]:
        return iter(self._rings.values())

    def ring_of(self, unit: HZPUnit) -> BufferRing:
        return self._rings[_size_of(unit)]

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self)

    @property
    def num_in_use(self) -> int:
        """Slots that hold something now."""
        return sum(ring.num_slots - ring.num_free for ring in self)


def _size_of(unit: HZPUnit) -> tuple:
    """Equal for units that fit the same slots."""
    topology = unit.groups.topology
    return unit.layout.padded_numel, unit.dtype, topology.world_size, topology.sizes
