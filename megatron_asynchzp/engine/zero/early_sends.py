# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a chunk's sends before the update of a step, until the update confirms or refutes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.sharding.backward_room import BackwardRoom
from megatron_asynchzp.engine.sharding.early_units import EarlyUnits
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.engine.zero.unit import HZPUnit


@dataclass
class _EarlySend:
    # Completes the gradients that `update` reads.
    grads: Task
    # See HZPUnit.preview_param_steps.
    update: Callable[[torch.Tensor], None]
    # Sends the result of `update`; None until it is submitted.
    task: Task | None = None
    # Whether the gradient changed after `update` had read it.
    is_outdated: bool = False


class EarlySends(EarlyUnits[HZPUnit]):
    """The early sends of a chunk: chosen in backward, confirmed by the update.

    main thread  | B u2, choose | B u1, choose |      | optimizer | confirm |
    lanes                  | update and send u2 | update and send u1 |
    """

    def __init__(self) -> None:
        super().__init__()
        # Computes the coming update of a unit; None: no unit is sent early.
        self.early_update: EarlyUpdate | None = None
        self._room = BackwardRoom()
        self._sends: dict[HZPUnit, _EarlySend] = {}

    def choose(self, unit: HZPUnit, grads: Task, step: int) -> bool:
        update = self.early_update
        if update is None or not self.is_allowed or unit in self.units:
            return False
        may_send = update.may_send(unit, step)
        if not self._room.should_send(unit.outer_traffic, may_send, update.is_forced):
            return False
        self._sends[unit] = _EarlySend(grads, update.preview_of(unit, step))
        return True

    def send_of(self, unit: HZPUnit) -> _EarlySend:
        return self._sends[unit]

    def note_grads(self, unit: HZPUnit) -> None:
        """Note that the gradient of `unit` is complete; an earlier send has read less of it."""
        if unit in self.units:
            self._sends[unit].is_outdated = True

    def await_send(self, unit: HZPUnit) -> None:
        if (send := self._sends.get(unit)) is not None and send.task is not None:
            send.task.wait()

    def await_all(self) -> None:
        for unit in self._sends:
            self.await_send(unit)

    @property
    def current_units(self) -> list[HZPUnit]:
        """The units that were sent with all of their gradients."""
        return [unit for unit in self.units if not self._sends[unit].is_outdated]

    def note_outcome(self, step: int, did_stand: bool) -> None:
        if self.early_update is not None and self.current_units:
            self.early_update.note_outcome(step, did_stand)

    def forget(self) -> None:
        self.units.clear()
        self._sends.clear()
        self._room = BackwardRoom()
