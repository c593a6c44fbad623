# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sleep: a rank's model chunks and their optimizer leave the device until they wake."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.sharding.in_flight import aligned_nbytes
from megatron_asynchzp.engine.sharding.value_hash import forget_weights
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.errors import ConfigurationError

NUM_COPIES = 10
"""The most copies between device and host; many small copies would be slow."""


@dataclass
class _Moved:
    storage: torch.UntypedStorage  # without memory
    nbytes: int  # that it had
    host: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # these bytes, 1-D, uint8


class HostCopy:
    """The memory of some tensors, and of all their views, on the host.

    Storages are packed on the device, about a tenth of all at a time, and each pack is one copy to
    or from pinned memory. Until `restore` the tensors have no memory and must not be used.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],  # on one device
        kept: Iterable[torch.Tensor],  # whose storages stay on the device
        device: Device,
        limit_s: float,  # for a copy
    ):
        self._device, self._limit_s = device, limit_s
        stays = {_key_of(tensor.untyped_storage()) for tensor in kept}
        storages = {_key_of(t.untyped_storage()): t.untyped_storage() for t in tensors}
        moved = [storage for key, storage in storages.items() if key not in stays]
        self._packs = [self._fetch(pack) for pack in _packs(moved)]
        self._await_copies()
        self._moved = {_key_of(item.storage): item for _, pack in self._packs for item in pack}
        for item in self._moved.values():
            item.storage.resize_(0)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of `tensor` on the host, or itself if it was not moved."""
        moved = self._moved.get(_key_of(tensor.untyped_storage()))
        if moved is None:
            return tensor
        values = moved.host.view(tensor.dtype)
        start = values.storage_offset() + tensor.storage_offset()
        return values.as_strided(tensor.shape, tensor.stride(), start)

    def restore(self) -> None:
        for host, pack in self._packs:
            for item in pack:
                item.storage.resize_(item.nbytes)
            first = _bytes_of(pack[0].storage)
            packed = first if len(pack) == 1 else first.new_empty(len(host))
            packed.copy_(host, non_blocking=True)
            for item, part in zip(pack, _parts(packed, pack), strict=True):
                if packed is not first:
                    _bytes_of(item.storage).copy_(part)
        self._await_copies()
        self._packs, self._moved = [], {}

    def _fetch(self, storages: list[torch.UntypedStorage]) -> "_Pack":
        pack = [_Moved(storage, storage.nbytes()) for storage in storages]
        first = _bytes_of(storages[0])
        packed = first if len(pack) == 1 else first.new_empty(_stops(pack)[-1])
        host = self._device.new_host_memory((len(packed),), torch.uint8)
        for item, part, own in zip(pack, _parts(packed, pack), _parts(host, pack), strict=True):
            if packed is not first:
                part.copy_(_bytes_of(item.storage))
            item.host = own
        host.copy_(packed, non_blocking=True)
        return host, pack

    def _await_copies(self) -> None:
        if not self._device.synchronize(self._device.record_event(), self._limit_s):
            raise TimeoutError(f"a copy between device and host took over {self._limit_s:g} s")


_Pack = tuple[torch.Tensor, list[_Moved]]
"""The bytes of several storages on the host, and the storages, in order."""


def _packs(storages: Iterable[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
    filled = [storage for storage in storages if storage.nbytes()]
    total, start = sum(storage.nbytes() for storage in filled), 0
    packs: dict[int, list[torch.UntypedStorage]] = {}
    for storage in filled:
        packs.setdefault(start * NUM_COPIES // total, []).append(storage)
        start += storage.nbytes()
    return list(packs.values())


def _stops(pack: Sequence[_Moved]) -> list[int]:
    """Return the end of each storage in its pack, in bytes; each begins aligned."""
    stops: list[int] = []
    for item in pack:
        begin = aligned_nbytes(stops[-1]) if stops else 0
        stops.append(begin + item.nbytes)
    return stops


def _parts(memory: torch.Tensor, pack: Sequence[_Moved]) -> list[torch.Tensor]:
    stops = _stops(pack)
    return [memory[stop - item.nbytes : stop] for stop, item in zip(stops, pack, strict=True)]


def _key_of(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


State = MutableMapping[Any, dict[str, Any]]


class Sleeper:
    """Puts the model chunks of a rank and their optimizer to sleep, and wakes them.

    `states` returns the optimizer's state by parameter, made if missing, so that a checkpoint can
    be saved asleep.
    """

    def __init__(self, schedulers: Sequence[StepScheduler], states: Callable[[], State]):
        self._schedulers, self._states = schedulers, states
        self._copy: HostCopy | None = None  # while asleep
        self._state: State = {}  # its tensors are on the host, and before in _on_device
        self._on_device: State = {}

    def sleep(self, level: int) -> None:
        """Fall asleep, between two steps. Collective. An error changes nothing.

        Level 1 frees memory in flight, gradients and optimizer states; 2 also the shards. Raises
        ConfigurationError also for a state whose memory cannot be moved.
        """
        for scheduler in self._schedulers:
            scheduler.check_between_steps("sleep()")
        if level not in (1, 2):
            raise ConfigurationError(
                f"sleep({level!r}): there is no such level. Use 1, or 2 to move parameters too."
            )
        for scheduler in self._schedulers:
            scheduler.settle()
        self._move(self._states(), level)

    def wake(self) -> None:
        """Bring everything back with the same bits. Collective.

        Without room on the device it raises, and can be called again. ConfigurationError means
        that nothing sleeps.
        """
        if self._copy is None:
            raise ConfigurationError("wake() without a sleep(). Call sleep() first.")
        self._copy.restore()
        for scheduler in self._schedulers:
            scheduler.wake_up()
        for param, values in self._on_device.items():
            self._state[param].update(values)
        self._copy, self._state, self._on_device = None, {}, {}

    def _move(self, state: State, level: int) -> None:
        """Move the tensors of `state` and the chunks' own to the host."""
        schedulers, driver = self._schedulers, self._schedulers[0].driver
        units = [unit for scheduler in schedulers for unit in scheduler.units]
        states = _tensors_of(state, units[0].device)
        for scheduler in schedulers:
            scheduler.gathers.reshard_all()
        limit_s = schedulers[0].schedule.time_limit_s
        # Streams may still use the memory that is freed next.
        if not driver.device.synchronize(driver.device.record_event(), limit_s):
            raise TimeoutError(f"the device was busy for {limit_s:g} s")
        params = [tensor for unit in units for tensor in unit.params_at_rest()]
        moved = [*states, *(tensor for unit in units for tensor in unit.states())]
        moved += [tensor for chunk in schedulers for tensor in chunk.sent_check.states()]
        kept = [] if level == 2 else params
        copy = HostCopy([*params, *moved], kept, driver.device, limit_s)
        # Only after the copy, so that an error for lack of host memory changes nothing.
        self._copy, self._state = copy, state
        self._on_device = {param: dict(values) for param, values in state.items()}
        for values in state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[key] = copy.value_of(value)
        driver.registered.deregister(limit_s)
        for scheduler in schedulers:
            scheduler.fall_asleep(copy.value_of)
        forget_weights()
        driver.device.release_cached()


def _tensors_of(state: State, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors on `device`; raise ConfigurationError for memory that cannot be moved."""
    values = [value for values in state.values() for value in values.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if special := [value for value in tensors if type(value) is not torch.Tensor]:
        raise ConfigurationError(
            f"sleep(): the optimizer's state has a {type(special[0]).__name__}, whose memory "
            "cannot be moved; take an optimizer whose states are plain tensors"
        )
    return [value for value in tensors if value.device.type == device.type]
