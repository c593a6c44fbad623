# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns optimizer states that are on the host between two updates: those of some units, which come
to the device to be updated and go back.
"""

from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharding.host_room import NUM_PLACES, aligned_nbytes, num_on_host
from megatron_asynchzp.zero.early_update import is_elementwise, step_beside
from megatron_asynchzp.zero.step import StepScheduler
from megatron_asynchzp.zero.taken_grads import forget_grad, given_grad
from megatron_asynchzp.zero.unit import HZPUnit

_States = MutableMapping[Any, dict[str, Any]]
_Kind = tuple[str, torch.dtype]
"""A state by its key, and its dtype."""
_MAIN: _Kind = ("main_param", torch.float32)


def move_to_host(schedulers: Sequence[StepScheduler], fraction: float) -> None:
    """Let the first units hold their optimizer states on the host: as few as have `fraction` of the
    elements that all have. Before there is an optimizer."""
    units = [unit for one in schedulers for unit in one.units if unit.is_trained]
    device = schedulers[0].driver.device
    for unit in units[: num_on_host([unit.optim_range.numel for unit in units], fraction)]:
        unit.hold_on_host(device.new_host_memory((unit.optim_range.numel,), torch.float32))
    device.release_cached()


@dataclass
class _Place:
    """A place on the device. memory: 1-D uint8. is_free: the event from which it may be written."""

    memory: torch.Tensor
    is_free: Any


class _UnitStates:
    """Optimizer states of one unit.

    params: the optimizer's, those with elements.
    on_host: by kind, an element for each of the unit's O range.
    is_stored: the event after which the last update is there.
    place: on the device, None at rest; there: as on_host; has_come: the event after which it is.
    """

    def __init__(self, unit: HZPUnit, params: Sequence[torch.nn.Parameter], driver: Driver):
        self.unit, self.params, self._driver = unit, params, driver
        self._at_rest = [param.data for param in params]
        start = unit.optim_range.start
        pieces = [piece for piece in unit.layout.fragments(unit.optim_range) if piece.numel]
        self._parts = [slice(piece.start - start, piece.stop - start) for piece in pieces]
        self.on_host: dict[_Kind, torch.Tensor] = {}
        if unit.is_main_param_away:
            self.on_host[_MAIN] = unit.main_param.storage
        self.is_stored: Any = None
        self.place: _Place | None = None
        self.there: dict[_Kind, torch.Tensor] = {}
        self.has_come: Any = None

    @property
    def nbytes(self) -> int:
        return sum(aligned_nbytes(one.numel() * one.itemsize) for one in self.on_host.values())

    @property
    def has_grads(self) -> bool:
        return any(given_grad(param) is not None for param in self.params)

    def begin(self, place: _Place) -> None:
        """Copy what is on the host to `place`, on the current stream."""
        self.place, start = place, 0
        for kind, values in self.on_host.items():
            nbytes = values.numel() * values.itemsize
            there = place.memory[start : start + nbytes].view(values.dtype)
            self.there[kind] = there.copy_(values, non_blocking=True)
            start += aligned_nbytes(nbytes)

    def point_there(self, states: _States) -> None:
        """Let the optimizer find parameters and states on the device."""
        for param, part in zip(self.params, self._parts, strict=True):
            if _MAIN in self.there:
                param.data = self.there[_MAIN][part]
            own = states.get(param, {})
            for key, kind in _kinds_in(own, param):
                own[key] = self.there[kind][part]

    def take_assigned(self) -> None:
        """Copy main parameters from where an optimizer that assigns to their data has put them."""
        for param, part in zip(self.params, self._parts, strict=True):
            if param.data_ptr() != (own := self.there[_MAIN][part]).data_ptr():
                own.copy_(param.data)

    def point_back(self, states: _States) -> None:
        """Let parameters and states be as at rest: those on the host, new ones included. What is
        on the device still has to be copied."""
        for param, part, at_rest in zip(self.params, self._parts, self._at_rest, strict=True):
            own = states.get(param, {})
            for key, kind in _kinds_in(own, param):
                if kind not in self.on_host:
                    shape = (self.unit.optim_range.numel,)
                    self.on_host[kind] = self._driver.device.new_host_memory(shape, kind[1]).zero_()
                # On the device where there is such a state already; its values follow.
                into = self.there.get(kind, self.on_host[kind])[part]
                if own[key].data_ptr() != into.data_ptr():
                    if kind not in self.there:
                        self.await_stored()
                    into.copy_(own[key])
                own[key] = self.on_host[kind][part]
            if _MAIN in self.there:
                param.data = at_rest

    def point_to_host(self) -> None:
        """Let parameters be on the host, without values, so that states are made there."""
        for param in self.params:
            param.data = torch.empty(param.shape, dtype=param.dtype)

    def leave_host(self, states: _States) -> None:
        """Undo that; states of one value, which are not held, go to the device."""
        for param, at_rest in zip(self.params, self._at_rest, strict=True):
            param.data = at_rest
            own = states.get(param, {})
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    own[key] = value.to(at_rest.device)

    def await_stored(self) -> None:
        """Hold the host until what is on the host is that of the last update."""
        if self.is_stored is not None:
            self._driver.await_event(self.is_stored)

    def store(self) -> None:
        """Copy what is on the device to the host, on the current stream."""
        for kind, values in self.there.items():
            self.on_host[kind].copy_(values, non_blocking=True)

    def end(self) -> None:
        self.place, self.there, self.has_come = None, {}, None


def _kinds_in(own: Mapping[str, Any], param: torch.Tensor) -> list[tuple[str, _Kind]]:
    """States of `param` that have a value for each of its elements."""
    return [
        (key, (key, value.dtype))
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    ]


class HostStates:
    """The states of the units that hold them on the host, and their update.

        copies in    | u0 | u1 |      | u2 |        a stream
        update            | u0 | u1 |      | u2 |   the current stream: as that of other units
        copies out             | u0 | u1 |      |   a stream

    Two places on the device, each for the largest unit, are all that this takes there. Between two
    updates the optimizer's parameters of these units read as NaN, and their states are on the host.

    schedulers: of all model chunks of the rank.
    optimizer: of all their parameters, for which is_elementwise holds.
    params_of: the optimizer's parameters of each trained unit, in the order of its layout.

    Raises ConfigurationError for an optimizer that cannot be stepped unit by unit.
    """

    def __init__(
        self,
        schedulers: Sequence[StepScheduler],
        optimizer: torch.optim.Optimizer,
        params_of: Mapping[HZPUnit, Sequence[torch.nn.Parameter]],
    ):
        self._optimizer = optimizer
        driver = schedulers[0].driver
        self._device = driver.device
        self._held = [
            _UnitStates(unit, [param for param in params if param.numel()], driver)
            for unit, params in params_of.items()
            if unit.is_on_host
        ]
        self._refuse_optimizer()
        self._in, self._out = self._device.new_stream(), self._device.new_stream()
        self._places: list[_Place] = []
        for scheduler in schedulers:
            scheduler.host_states = self

    def _refuse_optimizer(self) -> None:
        kind, states = type(self._optimizer).__name__, self._optimizer.state
        if not is_elementwise(self._optimizer):
            raise ConfigurationError(
                f"optimizer states on the host: {kind} is not known to update each element from "
                "that element alone, so it cannot be stepped unit by unit; take torch.optim.AdamW, "
                "Adam or SGD, or hold the states on the device"
            )
        if any(states.get(param) for held in self._held for param in held.params):
            raise ConfigurationError(
                f"optimizer states on the host: {kind} makes states before its first step, when "
                "main parameters are not on the device; hold the states there"
            )

    # ---- an update

    @torch.no_grad()
    def update(self) -> None:
        """Update these units with the gradients that their parameters have, as the optimizer would,
        and cast them to where parameters are sent from. Afterwards they have no gradient, so that
        the optimizer's own step leaves them alone."""
        self.take_over()
        groups = self._optimizer.param_groups
        group_of = {param: group for group in groups for param in group["params"]}
        due = [held for held in self._held if held.has_grads]
        for index, held in enumerate(due):
            for other in due[index : index + NUM_PLACES]:
                self._bring(other)
            self._device.wait_event(held.has_come)
            held.point_there(self._optimizer.state)
            of_params = [(one, group_of[one]) for one in held.params if one in group_of]
            step_beside(self._optimizer, of_params)
            if _MAIN in held.there:
                held.take_assigned()
                held.unit.cast_main_param(held.there[_MAIN])
            self._send_back(held)
            for param in held.params:
                forget_grad(param)
        for held in self._held:
            held.unit.is_cast = True
        self._make_room()

    def _bring(self, held: _UnitStates) -> None:
        if held.place is not None:
            return
        used = [id(one.place) for one in self._held]
        place = next(place for place in self._places if id(place) not in used)
        with self._device.on_stream(self._in):
            self._device.wait_event(place.is_free)
            self._device.wait_event(held.is_stored)
            held.begin(place)
            held.has_come = self._device.record_event()

    def _send_back(self, held: _UnitStates) -> None:
        held.point_back(self._optimizer.state)
        updated = self._device.record_event()
        assert held.place is not None  # it was brought
        with self._device.on_stream(self._out):
            self._device.wait_event(updated)
            held.store()
            held.is_stored = held.place.is_free = self._device.record_event()
        held.end()

    def _make_room(self) -> None:
        """Have places for the largest unit, while none is in use."""
        nbytes = max((held.nbytes for held in self._held), default=0)
        if self._places and self._places[0].memory.numel() >= nbytes:
            return
        for place in self._places:
            self._device.wait_event(place.is_free)  # what comes next in its memory
        self._places = []
        unit = self._held[0].unit
        with torch.inference_mode(False):
            memory = [
                torch.empty(nbytes, dtype=torch.uint8, device=unit.device)
                for _ in range(NUM_PLACES)
            ]
        self._places = [_Place(one, self._device.record_event()) for one in memory]

    # ---- between two updates

    @torch.no_grad()
    def take_over(self) -> None:
        """Move states that somebody has made, or loaded, to where this holds them."""
        for held in self._held:
            held.point_back(self._optimizer.state)
        self._make_room()

    @contextmanager
    def making_states(self) -> Generator[None]:
        """Around the making of states that there are not yet, which are made on the host."""
        for held in self._held:
            held.point_to_host()
        yield
        for held in self._held:
            held.leave_host(self._optimizer.state)
        self.take_over()

    def settle(self) -> None:
        """Hold the host until the states are there, and may be read and written."""
        for held in self._held:
            held.await_stored()

    def free(self) -> None:
        """After `settle`: free the places until the next update."""
        self._places = []
