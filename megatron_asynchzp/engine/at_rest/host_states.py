# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that stay on the host between updates and come to the device to be updated."""

from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.sharding.in_flight import NUM_PLACES, aligned_nbytes, num_on_host
from megatron_asynchzp.engine.zero.early_update import is_elementwise, step_beside
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.engine.zero.taken_grads import forget_grad, given_grad
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

_States = MutableMapping[Any, dict[str, Any]]
_Kind = tuple[str, torch.dtype]
"""Key and dtype of a state."""
_MAIN: _Kind = ("main_param", torch.float32)


def move_to_host(schedulers: Sequence[StepScheduler], fraction: float) -> None:
    """Hold the optimizer states of the first units on the host, before there is an optimizer.

    They are as few units as have `fraction` of all elements.
    """
    units = [unit for chunk in schedulers for unit in chunk.units if unit.is_trained]
    device = schedulers[0].driver.device
    for unit in units[: num_on_host([unit.optim_range.numel for unit in units], fraction)]:
        unit.hold_on_host(device.new_host_memory((unit.optim_range.numel,), torch.float32))
    device.release_cached()


@dataclass
class _DevicePlace:
    memory: torch.Tensor  # 1-D, uint8, on the device
    is_free: Any  # the event after which it may be written


class _UnitStates:
    """The optimizer states of a unit; `params` are the optimizer's with elements."""

    def __init__(self, unit: HZPUnit, params: Sequence[torch.nn.Parameter], driver: Driver):
        self.unit, self.params, self._driver = unit, params, driver
        self._at_rest = [param.data for param in params]
        start = unit.optim_range.start
        pieces = [piece for piece in unit.layout.fragments(unit.optim_range) if piece.numel]
        self._parts = [slice(piece.start - start, piece.stop - start) for piece in pieces]
        self.on_host: dict[_Kind, torch.Tensor] = {}  # an element for each of the O range
        if unit.is_main_param_away:
            self.on_host[_MAIN] = unit.main_param.storage
        self.is_stored: Any = None  # the event after which the last update is on the host
        self.place: _DevicePlace | None = None  # during an update
        self.on_device: dict[_Kind, torch.Tensor] = {}  # like on_host, during an update
        self.has_come: Any = None  # the event after which on_device has values

    @property
    def nbytes(self) -> int:
        return sum(aligned_nbytes(values.nbytes) for values in self.on_host.values())

    @property
    def has_grads(self) -> bool:
        return any(given_grad(param) is not None for param in self.params)

    def begin(self, place: _DevicePlace) -> None:
        self.place, start = place, 0
        for kind, values in self.on_host.items():
            target = place.memory[start : start + values.nbytes].view(values.dtype)
            self.on_device[kind] = target.copy_(values, non_blocking=True)
            start += aligned_nbytes(values.nbytes)

    def point_to_device(self, states: _States) -> None:
        for param, part in zip(self.params, self._parts, strict=True):
            if _MAIN in self.on_device:
                param.data = self.on_device[_MAIN][part]
            own = states.get(param, {})
            for key, kind in _kinds_in(own, param):
                own[key] = self.on_device[kind][part]

    def copy_assigned(self) -> None:
        """Copy main parameters from the memory that an optimizer assigned to their data."""
        for param, part in zip(self.params, self._parts, strict=True):
            if param.data_ptr() != (own := self.on_device[_MAIN][part]).data_ptr():
                own.copy_(param.data)

    def point_back(self, states: _States) -> None:
        """Point parameters and states, also new ones, at the host; `store` copies the values."""
        for param, part, at_rest in zip(self.params, self._parts, self._at_rest, strict=True):
            own = states.get(param, {})
            for key, kind in _kinds_in(own, param):
                if kind not in self.on_host:
                    shape = (self.unit.optim_range.numel,)
                    self.on_host[kind] = self._driver.device.new_host_memory(shape, kind[1]).zero_()
                # A state on the device stays there until `store`.
                into = self.on_device.get(kind, self.on_host[kind])[part]
                if own[key].data_ptr() != into.data_ptr():
                    if kind not in self.on_device:
                        self.await_stored()
                    into.copy_(own[key])
                own[key] = self.on_host[kind][part]
            if _MAIN in self.on_device:
                param.data = at_rest

    def point_to_host(self) -> None:
        """Point parameters at the host, without values, so that states are made there."""
        for param in self.params:
            param.data = torch.empty(param.shape, dtype=param.dtype)

    def leave_host(self, states: _States) -> None:
        """Undo `point_to_host`, and move scalar states, which are not held, to the device."""
        for param, at_rest in zip(self.params, self._at_rest, strict=True):
            param.data = at_rest
            own = states.get(param, {})
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    own[key] = value.to(at_rest.device)

    def await_stored(self) -> None:
        if self.is_stored is not None:
            self._driver.await_event(self.is_stored)

    def store(self) -> None:
        for kind, values in self.on_device.items():
            self.on_host[kind].copy_(values, non_blocking=True)

    def end(self) -> None:
        self.place, self.on_device, self.has_come = None, {}, None


def _kinds_in(own: Mapping[str, Any], param: torch.Tensor) -> list[tuple[str, _Kind]]:
    """Return the states of `param` that have a value for each of its elements."""
    return [
        (key, (key, value.dtype))
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    ]


class HostStates:
    """The states of the units that hold them on the host, and their update.

        copies in    | u0 | u1 |      | u2 |        a stream
        update            | u0 | u1 |      | u2 |   the current stream, as for other units
        copies out             | u0 | u1 |      |   a stream

    On the device it needs two places for the largest unit. Between two updates the optimizer's
    parameters of these units read as NaN. Raises ConfigurationError for an optimizer that cannot be
    stepped unit by unit.
    """

    def __init__(
        self,
        schedulers: Sequence[StepScheduler],  # of all model chunks of the rank
        optimizer: torch.optim.Optimizer,  # of all their parameters
        params_of: Mapping[HZPUnit, Sequence[torch.nn.Parameter]],  # in the order of the layouts
    ):
        self._optimizer = optimizer
        driver = schedulers[0].driver
        self._device = driver.device
        self._units = [
            _UnitStates(unit, [param for param in params if param.numel()], driver)
            for unit, params in params_of.items()
            if unit.is_on_host
        ]
        self._check_optimizer()
        self._in, self._out = self._device.new_stream(), self._device.new_stream()
        self._places: list[_DevicePlace] = []
        for scheduler in schedulers:
            scheduler.host_states = self

    def _check_optimizer(self) -> None:
        kind = type(self._optimizer).__name__
        if not is_elementwise(self._optimizer):
            raise ConfigurationError(
                f"optimizer states on the host: {kind} is not known to update each element from "
                "that element alone, so it cannot be stepped unit by unit; take torch.optim.AdamW, "
                "Adam or SGD, or hold the states on the device"
            )
        if any(self._optimizer.state.get(p) for unit in self._units for p in unit.params):
            raise ConfigurationError(
                f"optimizer states on the host: {kind} makes states before its first step, when "
                "main parameters are not on the device; hold the states there"
            )

    # ---- an update

    @torch.no_grad()
    def update(self) -> None:
        """Update these units as the optimizer would, and cast them to the parameter shards.

        Afterwards they have no gradients, so the optimizer's own step skips them.
        """
        self.take_over()
        groups = self._optimizer.param_groups
        group_of = {param: group for group in groups for param in group["params"]}
        due = [states for states in self._units if states.has_grads]
        for index, states in enumerate(due):
            for coming in due[index : index + NUM_PLACES]:
                self._bring(coming)
            self._device.wait_event(states.has_come)
            states.point_to_device(self._optimizer.state)
            of_params = [(param, group_of[param]) for param in states.params if param in group_of]
            step_beside(self._optimizer, of_params)
            if _MAIN in states.on_device:
                states.copy_assigned()
                states.unit.cast_main_param(states.on_device[_MAIN])
            self._send_back(states)
            for param in states.params:
                forget_grad(param)
        for states in self._units:
            states.unit.shard_is_current = True
        self._make_room()

    def _bring(self, states: _UnitStates) -> None:
        if states.place is not None:
            return
        used = [id(unit.place) for unit in self._units]
        place = next(place for place in self._places if id(place) not in used)
        with self._device.on_stream(self._in):
            self._device.wait_event(place.is_free)
            self._device.wait_event(states.is_stored)
            states.begin(place)
            states.has_come = self._device.record_event()

    def _send_back(self, states: _UnitStates) -> None:
        states.point_back(self._optimizer.state)
        updated = self._device.record_event()
        assert states.place is not None  # it was brought
        with self._device.on_stream(self._out):
            self._device.wait_event(updated)
            states.store()
            states.is_stored = states.place.is_free = self._device.record_event()
        states.end()

    def _make_room(self) -> None:
        nbytes = max((states.nbytes for states in self._units), default=0)
        if self._places and self._places[0].memory.numel() >= nbytes:
            return
        for place in self._places:
            self._device.wait_event(place.is_free)  # before other code gets its memory
        self._places = []
        unit = self._units[0].unit
        with torch.inference_mode(False):
            memory = [
                torch.empty(nbytes, dtype=torch.uint8, device=unit.device)
                for _ in range(NUM_PLACES)
            ]
        self._places = [_DevicePlace(place, self._device.record_event()) for place in memory]

    # ---- between two updates

    @torch.no_grad()
    def take_over(self) -> None:
        for states in self._units:
            states.point_back(self._optimizer.state)
        self._make_room()

    @contextmanager
    def making_states(self) -> Generator[None]:
        for states in self._units:
            states.point_to_host()
        yield
        for states in self._units:
            states.leave_host(self._optimizer.state)
        self.take_over()

    def settle(self) -> None:
        for states in self._units:
            states.await_stored()

    def free(self) -> None:
        self._places = []
