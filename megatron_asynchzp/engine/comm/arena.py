# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The memory in flight: one allocation in which users hold places in turn."""

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_asynchzp.engine.comm.registered import Allocator
from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap, overlap
from megatron_asynchzp.errors import raise_first

# Half a second in all: a busy machine may not run the backend's thread at once. Only a view that is
# kept costs all of it, once for each kind of unit.
_VIEW_CHECK_PAUSES_S = [0.002 * 2**index for index in range(8)]


class Place:
    """A part of an arena that one user at a time holds."""

    def __init__(self, extent: Extent, storage: torch.Tensor, is_outside: bool = False):
        self.extent = extent  # addresses in the arena
        # 1-D, with a torch storage of its own, so that its views can be counted.
        self.storage = storage
        self.is_outside = is_outside  # whether the memory is not the arena's
        self.ready: Sequence[Any] = ()  # events that the next writer's stream must wait for
        self._views: dict[str, list[torch.Tensor]] = {}
        self.count_own_views()

    def count_own_views(self) -> None:
        """Count the present views as the engine's own."""
        self._num_owners = self._count_owners()

    def _count_owners(self) -> int:
        return torch._C._storage_Use_Count(self.storage.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]

    def views_for(
        self, layout: str, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the views that `make` returns for this layout; they are made only once."""
        views = self._views.get(layout)
        if views is None:
            views = self._views[layout] = make(self.storage)
            self._num_owners += len(views)
        return views

    def is_viewed(self, patiently: bool = True) -> bool:
        """Return whether a tensor outside the engine views this memory, which is to be reused.

        `patiently` waits a moment, in which another thread may drop its handle of a collective.
        """
        for pause_s in _VIEW_CHECK_PAUSES_S if patiently else ():
            if self._count_owners() <= self._num_owners:
                return False
            time.sleep(pause_s)
        return self._count_owners() > self._num_owners


class Arena(MemoryMap[Any]):
    """A memory map with memory: users of any size and dtype hold places in one allocation.

    Only the main thread calls. If all sizes are multiples of 128 bytes, so are all addresses.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        record_event: Callable[[], Any],  # after all work issued on the current stream
        new_registered: Allocator | None = None,  # takes the place of torch's
    ):
        self._device, self._record_event = device, record_event
        self.is_registered = new_registered is not None
        self._new = new_registered or partial(torch.empty, dtype=torch.uint8, device=device)
        self._memory: dict[Extent, torch.Tensor] = {}
        self._places: dict[tuple[int, Hashable], Place] = {}
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
        """Return the place of `numel` elements over `extent`, which the caller holds.

        Args:
            extent: in this arena.
            kind: equal for users of the same numel and dtype.
            numel: elements of the place.
            dtype: of the place.
            is_outside: use new memory instead, while the arena's extent stays held.
        """
        if is_outside:
            memory = torch.empty(numel, dtype=dtype, device=self._device)
            place = Place(extent, memory, is_outside=True)
            place.ready = (self._record_event(),)
            return place
        place = self._places.get((extent[0], kind))
        if place is None:
            # dlpack gives the place its own torch storage, whose views can be counted.
            storage = torch.from_dlpack(self.bytes_at(extent).view(dtype))
            place = self._places[extent[0], kind] = Place(extent, storage)
        place.ready = self.pop_last_users(extent)
        return place

    def bytes_at(self, extent: Extent) -> torch.Tensor:
        region = next(region for region in self._memory if region[0] <= extent[0] < region[1])
        return self._memory[region][extent[0] - region[0] : extent[1] - region[0]]

    # ---- memory

    def grow(self, nbytes: int) -> Extent:
        region = super().grow(nbytes)
        self._allocate(region)
        return region

    def extend(self, nbytes: int) -> Extent:
        more = f"a step needs {nbytes / 2**20:.1f} MiB more in flight than are registered with NCCL"
        remedy = "Raise --asynchzp-prefetch-depth, or drop --use-nccl-ub (registers_memory)."
        raise_first([f"{more}. {remedy}"] if self.is_registered else [])
        return self.grow(nbytes)

    def _allocate(self, region: Extent) -> None:
        self._memory[region] = self._new(region[1] - region[0])
        # Work of the memory's previous owner may still run on the current stream.
        if (event := self._record_event()) is not None:
            self.note_last_user(region, event)

    def free(self) -> None:
        if self.num_held:
            raise RuntimeError(f"the arena cannot be freed while {self.num_held} places are held")
        self._memory, self._places = {}, {}

    def allocate(self) -> None:
        for region in self._regions:
            if region not in self._memory:
                self._allocate(region)

    def abandon(self, place: Place) -> None:
        """Leave the memory around `place` to the tensors that view it, and allocate new memory."""
        region = next(region for region in self._memory if overlap(region, place.extent))
        self._places = {
            key: held for key, held in self._places.items() if not overlap(held.extent, region)
        }
        self._allocate(region)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Allocated memory, a tensor for each region."""
        return list(self._memory.values())
