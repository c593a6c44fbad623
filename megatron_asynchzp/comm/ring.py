# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory of what is in flight: fixed slots, allocated once, reused in turn."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

_VIEW_CHECKS, _VIEW_CHECK_PAUSE_S = 5, 0.002


class Slot:
    """One 1-D buffer of a ring.

    scratch: memory that the slot's operation needs beside it; free_event: what the next writer's
    stream must wait for.

    Views of the storage are made once per user layout: making them costs more than using them.
    """

    def __init__(self, storage: torch.Tensor, scratch: Sequence[torch.Tensor] = ()):
        self.storage = storage
        self.scratch = scratch
        self.free_event: Any = None
        self._views: dict[str, list[torch.Tensor]] = {}
        self._num_owners = self._count_owners()

    def _count_owners(self) -> int:
        return torch._C._storage_Use_Count(self.storage.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]

    def views_for(
        self, layout: str, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `make` makes of the storage for users of this layout; no tensor but views."""
        views = self._views.get(layout)
        if views is None:
            views = self._views[layout] = make(self.storage)
            self._num_owners += len(views)
        return views

    def is_viewed(self, patiently: bool = True) -> bool:
        """Whether a tensor outside the ring lies in this memory, which is to be reused now.

        patiently: ask again after a moment, in which a backend's thread may drop its handle.
        """
        for _ in range(_VIEW_CHECKS if patiently else 1):
            if self._count_owners() <= self._num_owners:
                return False
            if patiently:
                time.sleep(_VIEW_CHECK_PAUSE_S)
        return True

    def leave_storage(self) -> None:
        """Take new memory and leave the old one to the tensors that still view it."""
        self.storage = torch.zeros_like(self.storage)
        self._views.clear()
        self._num_owners = self._count_owners()

    @property
    def nbytes(self) -> int:
        """Of the buffer and its scratch memory."""
        return sum(tensor.nbytes for tensor in (self.storage, *self.scratch))


class BufferRings[User]:
    """A ring of equal slots for each size of user; in each, slots are handed out oldest first.

    Slots are taken and given back by the main thread alone, in an order that is the same on
    every rank; so which user gets a slot, and when, never depends on timing.

    users: all there are; needs_slot: which of them ever hold a slot; size_of: equal for users
    that fit the same slots; max_slots: slots per size, never more than it has users; new_slot:
    allocates one that fits the user.
    """

    def __init__(
        self,
        users: Sequence[User],
        needs_slot: Callable[[User], bool],
        size_of: Callable[[User], Hashable],
        max_slots: int,
        new_slot: Callable[[User], Slot],
    ):
        self._size_of, self._new_slot = size_of, new_slot
        self._rings: dict[Hashable, list[Slot]] = {}
        num_equal = Counter(map(size_of, users))
        for user in filter(needs_slot, users):
            size = size_of(user)
            if size not in self._rings:
                num_slots = min(num_equal[size], max_slots)
                self._rings[size] = [new_slot(user) for _ in range(num_slots)]
        self._free = {size: list(slots) for size, slots in self._rings.items()}

    def acquire(self, user: User) -> Slot | None:
        """The slot for `user` that has been free for longest; None where all are in use."""
        free = self._free[self._size_of(user)]
        return free.pop(0) if free else None

    def release(self, user: User, slot: Slot, free_event: Any = None) -> None:
        """Give back the slot of `user`; it may be rewritten once `free_event` has happened."""
        free = self._free[self._size_of(user)]
        if slot in free:
            raise RuntimeError("a slot was given back twice")
        slot.free_event = free_event
        free.append(slot)

    def grow(self, user: User) -> Slot:
        """One more slot, for good: more users are active at once than the ring was made for."""
        slot = self._new_slot(user)
        self._rings[self._size_of(user)].append(slot)
        return slot

    @property
    def slots(self) -> Iterable[Slot]:
        """All slots, free or in use, ring by ring."""
        return (slot for ring in self._rings.values() for slot in ring)

    @property
    def num_in_use(self) -> int:
        """Slots that hold something now."""
        return sum(len(ring) - len(self._free[size]) for size, ring in self._rings.items())

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(slot.nbytes for slot in self.slots)
