# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory of what is in flight: one allocation, of which users hold places in turn."""

import time
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from megatron_asynchzp.sharding.in_flight import first_fit, leaves_room

_VIEW_CHECKS, _VIEW_CHECK_PAUSE_S = 5, 0.002
Span = tuple[int, int]
"""Half-open range of addresses, in bytes."""


class Place:
    """A part of an arena that one user at a time holds.

    span: its addresses in the arena; storage: 1-D tensor over it, with a torch storage of its own,
    so that tensors which view this place can be counted; is_apart: the memory is not the arena's;
    ready: events that the next writer's stream must wait for.

    Views of the storage are made once per user layout: making them costs more than using them.
    """

    def __init__(self, span: Span, storage: torch.Tensor, is_apart: bool = False):
        self.span, self.storage, self.is_apart = span, storage, is_apart
        self.ready: Sequence[Any] = ()
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
        """Whether a tensor that is not the engine's lies in this memory, which is to be reused now.

        patiently: ask again after a moment, in which a backend's thread may drop its handle.
        """
        for _ in range(_VIEW_CHECKS if patiently else 1):
            if self._count_owners() <= self._num_owners:
                return False
            if patiently:
                time.sleep(_VIEW_CHECK_PAUSE_S)
        return True


class Arena:
    """One allocation in which users of any size and dtype hold places.

        | root | layer 3 |       free       | layer 2 |

    A place is the first free part that is large enough, seen from one end: users of different size
    that ask for opposite ends leave what is free in one piece between them. Which place it is
    follows from the order of calls alone, which is the same on every rank; so which
    user gets a place, and when, never depends on timing. The main thread alone calls.

    nbytes: how much; device: where; record_event: an event after all that was issued so far on the
    current stream. Sizes that are multiples of 128 bytes keep all places aligned to that.
    """

    def __init__(self, nbytes: int, device: torch.device, record_event: Callable[[], Any]):
        self._device, self._record_event = device, record_event
        self._regions: list[Span] = []
        self._memory: dict[Span, torch.Tensor] = {}
        self._held: list[Span] = []  # sorted
        self._last_users: list[tuple[Span, Any]] = []
        self._known: dict[tuple[int, Hashable], Place] = {}
        if nbytes:
            self.grow(nbytes)

    # ---- places

    def acquire(
        self,
        kind: Hashable,
        numel: int,
        dtype: torch.dtype,
        from_top: bool = False,
        is_apart: bool = False,
    ) -> Place | None:
        """A place for `numel` elements; None where no free part is large enough.

        kind: equal for users of the same numel and dtype; from_top: seen from the upper end;
        is_apart: with new memory, although the arena's is taken all the same.
        """
        nbytes = numel * dtype.itemsize
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return None
        span = (start, start + nbytes)
        if is_apart:
            apart = torch.empty(numel, dtype=dtype, device=self._device)
            place = Place(span, apart, is_apart=True)
            place.ready = (self._record_event(),)
        else:
            place = self._known.get((start, kind))
            if place is None:
                place = self._known[start, kind] = Place(span, self._storage(span, dtype))
            place.ready = self._hand_over(span)
        insort(self._held, span)
        return place

    def _hand_over(self, span: Span) -> list[Any]:
        """The events of those who used a part of `span` last, and are forgotten as far as it goes:
        whoever writes there later comes after its next user."""
        ready: list[Any] = []
        rest: list[tuple[Span, Any]] = []
        for used, event in self._last_users:
            if _overlap(used, span):
                ready.append(event)
                rest += [(cut, event) for cut in _without(used, span)]
            else:
                rest.append((used, event))
        self._last_users = rest
        return ready

    def leaves_room(
        self, nbytes: int, from_top: bool, beside: Sequence[Place], more: Sequence[tuple[int, bool]]
    ) -> bool:
        """Whether after `acquire` of so many bytes places for all of `more`, each (nbytes,
        from_top), could be found if nothing but that one and `beside` were held."""
        spans = [place.span for place in beside]
        return leaves_room(self._regions, self._held, nbytes, from_top, spans, more)

    def _storage(self, span: Span, dtype: torch.dtype) -> torch.Tensor:
        region = next(region for region in self._regions if region[0] <= span[0] < region[1])
        part = self._memory[region][span[0] - region[0] : span[1] - region[0]]
        # Not a view: the tensors that view this place would count as views of all others.
        return torch.from_dlpack(part.view(dtype))

    def release(self, place: Place, last_user: Any = None) -> None:
        """Give back `place`; it may be rewritten once the event `last_user` has happened."""
        if place.span not in self._held:
            raise RuntimeError("a place was given back twice")
        self._held.remove(place.span)
        if last_user is not None and not place.is_apart:
            self._last_users.append((place.span, last_user))

    # ---- memory

    def grow(self, nbytes: int) -> None:
        """So much more, for good: more is needed at once than the arena was made for."""
        start = self.nbytes
        region = (start, start + nbytes)
        self._regions.append(region)
        self._allocate(region)

    def _allocate(self, region: Span) -> None:
        nbytes = region[1] - region[0]
        self._memory[region] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # What used this memory before may still run on the current stream.
        if (event := self._record_event()) is not None:
            self._last_users.append((region, event))

    def leave(self, place: Place) -> None:
        """Leave the memory around `place` to the tensors that still view it, and take new one."""
        region = next(region for region in self._regions if _overlap(region, place.span))
        self._known = {
            key: known for key, known in self._known.items() if not _overlap(known.span, region)
        }
        self._allocate(region)

    @property
    def nbytes(self) -> int:
        """Of all places together, held or free."""
        return self._regions[-1][1] if self._regions else 0

    @property
    def memory(self) -> list[torch.Tensor]:
        """What it has allocated."""
        return list(self._memory.values())

    @property
    def num_held(self) -> int:
        """Places that hold something now."""
        return len(self._held)


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _without(span: Span, taken: Span) -> list[Span]:
    """What is left of `span`, which overlaps; no empty parts."""
    rest = (span[0], taken[0]), (taken[1], span[1])
    return [part for part in rest if part[0] < part[1]]
