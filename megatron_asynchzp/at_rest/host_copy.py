# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns tensors whose memory was moved from the device to the host, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_asynchzp.device import Device
from megatron_asynchzp.sharding.host_room import aligned_nbytes

NUM_COPIES = 10
"""At most so many between device and host: many small ones reach a small part of its speed."""


@dataclass
class _Moved:
    """A storage without memory. nbytes: that it had; host: these bytes (1-D, uint8)."""

    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class HostCopy:
    """The memory of some tensors, and of all their views, on the host.

    Storages are packed on the device, about a tenth of all at a time, and each pack is one copy to
    or from pinned memory. In between the tensors keep their shapes and have no memory: they must
    not be used.

    tensors: on one device; those that share a storage are moved once.
    kept: what shares a storage with one of these stays.
    limit_s: seconds that a copy takes at most.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        kept: Iterable[torch.Tensor],
        device: Device,
        limit_s: float,
    ):
        self._device, self._limit_s = device, limit_s
        stays = {_key_of(one.untyped_storage()) for one in kept}
        storages = {_key_of(one.untyped_storage()): one.untyped_storage() for one in tensors}
        moved = [storage for key, storage in storages.items() if key not in stays]
        self._packs = [self._fetch(pack) for pack in _packs(moved)]
        self._await_copies()
        self._moved = {_key_of(one.storage): one for _, pack in self._packs for one in pack}
        for one in self._moved.values():
            one.storage.resize_(0)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of `tensor` on the host; itself where it was not moved."""
        moved = self._moved.get(_key_of(tensor.untyped_storage()))
        if moved is None:
            return tensor
        values = moved.host.view(tensor.dtype)
        start = values.storage_offset() + tensor.storage_offset()
        return values.as_strided(tensor.shape, tensor.stride(), start)

    def restore(self) -> None:
        """Give the tensors memory with the same bytes. Once."""
        for host, pack in self._packs:
            for one in pack:
                one.storage.resize_(one.nbytes)
            first = _bytes_of(pack[0].storage)
            packed = first if len(pack) == 1 else first.new_empty(len(host))
            packed.copy_(host, non_blocking=True)
            for one, part in zip(pack, _parts(packed, pack), strict=True):
                if packed is not first:
                    _bytes_of(one.storage).copy_(part)
        self._await_copies()
        self._packs, self._moved = [], {}

    def _fetch(self, storages: list[torch.UntypedStorage]) -> "_Pack":
        pack = [_Moved(one, one.nbytes()) for one in storages]
        first = _bytes_of(storages[0])
        packed = first if len(pack) == 1 else first.new_empty(_stops(pack)[-1])
        host = self._device.new_host_memory((len(packed),), torch.uint8)
        for one, part, on_host in zip(pack, _parts(packed, pack), _parts(host, pack), strict=True):
            if packed is not first:
                part.copy_(_bytes_of(one.storage))
            one.host = on_host
        host.copy_(packed, non_blocking=True)
        return host, pack

    def _await_copies(self) -> None:
        if not self._device.synchronize(self._device.record_event(), self._limit_s):
            raise TimeoutError(f"a copy between device and host took {self._limit_s:g} s")


_Pack = tuple[torch.Tensor, list[_Moved]]
"""Bytes of several storages on the host, one after the other."""


def _packs(storages: Iterable[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
    """Group storages into at most NUM_COPIES packs, of about as many bytes each."""
    filled = [one for one in storages if one.nbytes()]
    total, start = sum(one.nbytes() for one in filled), 0
    packs: dict[int, list[torch.UntypedStorage]] = {}
    for one in filled:
        packs.setdefault(start * NUM_COPIES // total, []).append(one)
        start += one.nbytes()
    return list(packs.values())


def _stops(pack: Sequence[_Moved]) -> list[int]:
    """Return where each storage ends in its pack, in bytes; each begins at an aligned place."""
    stops: list[int] = []
    for one in pack:
        begin = aligned_nbytes(stops[-1]) if stops else 0
        stops.append(begin + one.nbytes)
    return stops


def _parts(memory: torch.Tensor, pack: Sequence[_Moved]) -> list[torch.Tensor]:
    """Return each storage's part of `memory` (1-D, uint8), which is that of the pack."""
    stops = _stops(pack)
    return [memory[stop - one.nbytes : stop] for stop, one in zip(stops, pack, strict=True)]


def _key_of(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore
