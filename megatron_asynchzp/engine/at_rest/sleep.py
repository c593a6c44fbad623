# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sleep: a rank's model chunks and their optimizer leave the device until they wake."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from megatron_asynchzp.engine.at_rest.host_copy import HostCopy
from megatron_asynchzp.engine.zero.fingerprint import forget_weights
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.errors import ConfigurationError

State = MutableMapping[Any, dict[str, Any]]


class Sleeper:
    """Puts the model chunks of a rank and their optimizer to sleep, and wakes them.

    `states` returns the optimizer's state by parameter, made if missing, so that a checkpoint can
    be saved asleep.
    """

    def __init__(self, schedulers: Sequence[StepScheduler], states: Callable[[], State]):
        self._schedulers, self._states = schedulers, states
        self._sleep: _Sleep | None = None

    def sleep(self, level: int) -> None:
        """Fall asleep, between two steps. Collective. An error changes nothing.

        Args:
            level: 1 frees memory in flight, gradients and optimizer states; 2 also the shards.

        Raises:
            ConfigurationError: within a step, asleep, for another level, or for a state whose
                memory cannot be moved.
        """
        for scheduler in self._schedulers:
            scheduler.check_between_steps("sleep()")
        if level not in (1, 2):
            raise ConfigurationError(
                f"sleep({level!r}): there is no such level. Use 1, or 2 to move parameters too."
            )
        for scheduler in self._schedulers:
            scheduler.settle()
        self._sleep = _Sleep(self._schedulers, self._states(), level)

    def wake(self) -> None:
        """Bring everything back with the same bits. Collective.

        Without room on the device it raises, and can be called again. ConfigurationError means
        that nothing sleeps.
        """
        if self._sleep is None:
            raise ConfigurationError("wake() without a sleep(). Call sleep() first.")
        self._sleep.end()
        self._sleep = None


class _Sleep:
    """A sleep from its creation to `end`; meanwhile the tensors of `state` are on the host."""

    def __init__(self, schedulers: Sequence[StepScheduler], state: State, level: int):
        self._schedulers, self._state = schedulers, state
        driver = schedulers[0].driver
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
        self._copy = HostCopy([*params, *moved], kept, driver.device, limit_s)
        # Only after the copy, so that an error for lack of host memory changes nothing.
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
    """Return the tensors on `device`; raise ConfigurationError for memory that cannot be moved."""
    values = [value for values in state.values() for value in values.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if special := [value for value in tensors if type(value) is not torch.Tensor]:
        raise ConfigurationError(
            f"sleep(): the optimizer's state has a {type(special[0]).__name__}, whose memory "
            "cannot be moved; take an optimizer whose states are plain tensors"
        )
    return [value for value in tensors if value.device.type == device.type]
