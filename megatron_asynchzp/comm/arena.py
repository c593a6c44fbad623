# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory of what is in flight: one allocation, of which users hold places in turn."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from megatron_asynchzp.sharding.memory_map import Extent, MemoryMap, overlap

# Half a second together: the other thread may not get a core at once. It is paid where a view is
# really kept, once for a kind of unit.
_VIEW_CHECK_PAUSES_S = [0.002 * 2**index for index in range(8)]


class Place:
    """A part of an arena that one user at a time holds.

    extent: its addresses in the arena.
    storage: 1-D tensor over it, with a torch storage of its own, so that tensors which view this
        place can be counted.
    is_outside: the memory is not the arena's.
    ready: events that the next writer's stream must wait for.

    Views of the storage are made once per user layout: making them costs more than using them.
    """

    def __init__(self, extent: Extent, storage: torch.Tensor, is_outside: bool = False):
        self.extent, self.storage, self.is_outside = extent, storage, is_outside
        self.ready: Sequence[Any] = ()
        self._views: dict[str, list[torch.Tensor]] = {}
        self.note_owners()

    def note_owners(self) -> None:
        """Whoever views the storage now may keep its views."""
        self._num_owners = self._count_owners()

    def _count_owners(self) -> int:
        return torch._C._storage_Use_Count(self.storage.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]

    def views_for(
        self, layout: str, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return what `make` makes of the storage for this layout: tensors that all view it."""
        views = self._views.get(layout)
        if views is None:
            views = self._views[layout] = make(self.storage)
            self._num_owners += len(views)
        return views

    def is_viewed(self, patiently: bool = True) -> bool:
        """Whether a tensor that is not the engine's lies in this memory, which is to be reused now.

        patiently: ask again after a moment, in which a backend's thread may drop its handle.
        """
        for pause_s in _VIEW_CHECK_PAUSES_S if patiently else ():
            if self._count_owners() <= self._num_owners:
                return False
            time.sleep(pause_s)
        return self._count_owners() > self._num_owners


class Arena(MemoryMap[Any]):
    """One allocation in which users of any size and dtype hold places; who gets which is decided by
    the memory map. The main thread alone calls.

    nbytes: how much. Sizes that are multiples of 128 bytes keep all places aligned to that.
    device: where.
    record_event: an event after all that was issued so far on the current stream.
    """

    def __init__(self, nbytes: int, device: torch.device, record_event: Callable[[], Any]):
        self._device, self._record_event = device, record_event
        self._memory: dict[Extent, torch.Tensor] = {}
        self._known: dict[tuple[int, Hashable], Place] = {}
        super().__init__(nbytes)

    # ---- places

    def place_at(
        self,
        extent: Extent,
        kind: Hashable,
        numel: int,
        dtype: torch.dtype,
        is_outside: bool = False,
    ) -> Place:
        """The place of `numel` elements over `extent`, which the caller holds.

        kind: equal for users of the same numel and dtype.
        is_outside: with new memory, although the arena's is taken all the same.
        """
        if is_outside:
            apart = torch.empty(numel, dtype=dtype, device=self._device)
            place = Place(extent, apart, is_outside=True)
            place.ready = (self._record_event(),)
            return place
        place = self._known.get((extent[0], kind))
        if place is None:
            place = self._known[extent[0], kind] = Place(extent, self._storage(extent, dtype))
        place.ready = self.pop_last_users(extent)
        return place

    def _storage(self, extent: Extent, dtype: torch.dtype) -> torch.Tensor:
        # Not a view: the tensors that view this place would count as views of all others.
        return torch.from_dlpack(self.bytes_at(extent).view(dtype))

    def bytes_at(self, extent: Extent) -> torch.Tensor:
        """The memory of `extent`: 1-D, uint8."""
        region = next(region for region in self._memory if region[0] <= extent[0] < region[1])
        return self._memory[region][extent[0] - region[0] : extent[1] - region[0]]

    # ---- memory

    def grow(self, nbytes: int) -> Extent:
        region = super().grow(nbytes)
        self._allocate(region)
        return region

    def _allocate(self, region: Extent) -> None:
        nbytes = region[1] - region[0]
        self._memory[region] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # What used this memory before may still run on the current stream.
        if (event := self._record_event()) is not None:
            self.note_last_user(region, event)

    def free(self) -> None:
        """Give its memory back, until `allocate`. Nobody holds a place."""
        if self.num_held:
            raise RuntimeError("memory in use cannot be freed")
        self._memory, self._known = {}, {}

    def allocate(self) -> None:
        """Take new memory in place of what was freed."""
        for region in self._regions:
            if region not in self._memory:
                self._allocate(region)

    def abandon(self, place: Place) -> None:
        """Leave the memory around `place` to the tensors that still view it, and take new one."""
        region = next(region for region in self._memory if overlap(region, place.extent))
        self._known = {
            key: known for key, known in self._known.items() if not overlap(known.extent, region)
        }
        self._allocate(region)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Memory that it has allocated, a tensor for each region."""
        return list(self._memory.values())
