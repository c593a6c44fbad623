# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns sleeping: what a rank's model chunks and their optimizer have on the device is on the host
until they wake.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from megatron_asynchzp.at_rest.host_copy import HostCopy
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.fingerprint import forget_weights
from megatron_asynchzp.zero.step import StepScheduler

State = MutableMapping[Any, dict[str, Any]]


class Sleeper:
    """Puts the model chunks of a rank and their optimizer to sleep, and wakes them, any number of
    times.

    schedulers: of all model chunks of the rank.
    states: makes the optimizer's state where there is none yet, for a checkpoint that is saved
        asleep, and returns it, by parameter.
    """

    def __init__(self, schedulers: Sequence[StepScheduler], states: Callable[[], State]):
        self._schedulers, self._states = schedulers, states
        self._sleep: _Sleep | None = None

    def sleep(self, level: int) -> None:
        """Between two steps. Collective.

        level: 1 for gradients and optimizer states, 2 for the parameter shards too. The memory in
            flight is freed either way.

        Raises ConfigurationError within a step, asleep, for another level, and for a state whose
        memory cannot be moved; then nothing has changed.
        """
        for scheduler in self._schedulers:
            scheduler.between_steps("sleep()")
        if level not in (1, 2):
            raise ConfigurationError(f"sleep({level!r}): the level is 1, or 2 with the parameters")
        for scheduler in self._schedulers:
            scheduler.settle()
        self._sleep = _Sleep(self._schedulers, self._states(), level)

    def wake(self) -> None:
        """Bring back what was moved, with the same bits. Collective. Where the device has no room
        it goes on, and can be ended later. Raises ConfigurationError where nothing sleeps."""
        if self._sleep is None:
            raise ConfigurationError("wake() without a sleep()")
        self._sleep.end()
        self._sleep = None


class _Sleep:
    """Begins when it is made, while nothing is in flight. Until its end the tensors of `state` are
    those on the host."""

    def __init__(self, schedulers: Sequence[StepScheduler], state: State, level: int):
        self._schedulers, self._state = schedulers, state
        driver = schedulers[0].driver
        units = [unit for scheduler in schedulers for unit in scheduler.units]
        states = _tensors_of(state, units[0].device)
        for scheduler in schedulers:
            scheduler.gathers.reshard_all()
        limit_s = schedulers[0].schedule.time_limit_s
        # What streams still do with the memory that is freed next.
        if not driver.device.synchronize(driver.device.record_event(), limit_s):
            raise TimeoutError(f"the device was busy for {limit_s:g} s")
        params = [one for unit in units for one in unit.params_at_rest()]
        moved = [*states, *(one for unit in units for one in unit.states())]
        moved += [one for scheduler in schedulers for one in scheduler.sent_check.states()]
        kept = [] if level == 2 else params
        self._copy = HostCopy([*params, *moved], kept, driver.device, limit_s)
        # Only now: where memory of the host is short everything is as it was.
        self._on_device = {param: dict(values) for param, values in state.items()}
        for values in state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[key] = self._copy.value_of(value)
        for scheduler in schedulers:
            scheduler.fall_asleep(self._copy.value_of)
        forget_weights()
        driver.device.release_cached()

    def end(self) -> None:
        self._copy.restore()
        for scheduler in self._schedulers:
            scheduler.wake_up()
        for param, values in self._on_device.items():
            self._state[param].update(values)


def _tensors_of(state: State, device: torch.device) -> list[torch.Tensor]:
    """List tensors on `device`. Raises ConfigurationError where one's memory cannot be moved."""
    values = [value for values in state.values() for value in values.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if other := [value for value in tensors if type(value) is not torch.Tensor]:
        raise ConfigurationError(
            f"sleep(): the optimizer's state has a {type(other[0]).__name__}, whose memory "
            "cannot be moved; take an optimizer whose states are plain tensors"
        )
    return [value for value in tensors if value.device.type == device.type]
