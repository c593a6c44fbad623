# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory of what is in flight: fixed slots, allocated once, reused in turn. Must not know
what is in a slot or in which order units come.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_VIEW_CHECKS, _VIEW_CHECK_PAUSE_S = 5, 0.002


class Slot:
    """One 1-D buffer of a ring.

    scratch: memory that the slot's operation needs beside it; free_event: what the next writer's
    stream must wait for.
    """

    def __init__(self, storage: torch.Tensor, scratch: Sequence[torch.Tensor] = ()):
        self.storage = storage
        self.scratch = scratch
        self.free_event: Any = None
        self._num_owners = self._count_owners()

    def _count_owners(self) -> int:
        return torch._C._storage_Use_Count(self.storage.untyped_storage()._cdata)

    def is_viewed(self) -> bool:
        """Whether a tensor of somebody else lies in this memory, which is to be reused now."""
        for _ in range(_VIEW_CHECKS):  # a backend's thread may drop its handle a moment later
            if self._count_owners() <= self._num_owners:
                return False
            time.sleep(_VIEW_CHECK_PAUSE_S)
        return True

    def leave_storage(self) -> None:
        """Take new memory and leave the old one to whoever still has views of it."""
        self.storage = torch.zeros_like(self.storage)
        self._num_owners = self._count_owners()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.storage, *self.scratch))


class BufferRing:
    """`num_slots` equal slots for one kind of operation, handed out oldest first.

    Slots are taken and given back by the main thread alone, in an order that is the same on
    every rank; so which unit gets a slot, and when, never depends on timing.

    new_slot: allocates one.
    """

    def __init__(self, num_slots: int, new_slot: Callable[[], Slot]):
        self._new_slot = new_slot
        self._slots = [new_slot() for _ in range(num_slots)]
        self._free = list(self._slots)

    def acquire(self) -> Slot | None:
        """The slot that has been free for longest; None where all are in use."""
        return self._free.pop(0) if self._free else None

    def release(self, slot: Slot, free_event: Any = None) -> None:
        """Give `slot` back; it may be rewritten once `free_event` has happened."""
        if slot in self._free:
            raise RuntimeError("a slot was given back twice")
        slot.free_event = free_event
        self._free.append(slot)

    def grow(self) -> Slot:
        """One more slot, for good: more units are needed at once than the ring was made for."""
        slot = self._new_slot()
        self._slots.append(slot)
        return slot

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)
