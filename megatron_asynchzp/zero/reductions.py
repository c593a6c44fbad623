# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the gradients in flight: in which slot a unit's are collected, which are on their way, and
what waits for them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron_asynchzp.comm.collectives import Steps, new_shards
from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.comm.ring import BufferRings, Slot
from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.unit import HZPUnit

Update = Callable[[HZPUnit], None]


class _Collected(NamedTuple):
    """The gradients of a unit in this micro-batch: where they go, the place of each parameter
    there, and which of these have a gradient."""

    slot: Slot
    places: list[torch.Tensor]
    written: set[int]


def new_grad_rings(units: Sequence[HZPUnit], config: ScheduleConfig) -> BufferRings[HZPUnit]:
    """Slots for the full fp32 gradients of `units`, with the memory that reducing them needs."""

    def new_slot(unit: HZPUnit) -> Slot:
        full = torch.zeros(unit.layout.padded_numel, dtype=torch.float32, device=unit.device)
        return Slot(full, new_shards(full, unit.groups.grad_reduce, unit.groups.grad_dtype))

    return BufferRings(
        units,
        lambda unit: unit.is_trained and not unit.reduces_in_place,
        lambda unit: unit.slot_size,
        config.grad_slots,
        new_slot,
    )


class Reductions:
    """Collects the gradients of units and reduces them.

        main        | B u2 | B u1 | ...
        reduce             | u2 | u1 |                                     gradient ring
        grad-sync               | u2 | u1 |                                last micro-batch

    scale: factor on the summed gradients.
    """

    def __init__(
        self, units: Sequence[HZPUnit], config: ScheduleConfig, driver: Driver, scale: float
    ):
        self._driver, self._scale = driver, scale
        self._collected: dict[HZPUnit, _Collected] = {}
        self._reductions: deque[tuple[HZPUnit, Slot, Task]] = deque()
        self._last_reduction: dict[HZPUnit, Task] = {}
        self._syncs: dict[HZPUnit, Task] = {}
        self.rings = new_grad_rings(units, config)

    # ---- one micro-batch

    def take(self, unit: HZPUnit, indices: Iterable[int]) -> None:
        """Move the gradients of the parameters `indices`, as far as there are any, to the fp32
        memory of the unit; another one of the same parameter is added to it."""
        if unit.reduces_in_place:
            unit.take_grads(indices, unit.whole_grads)
        else:
            collected = self._collect(unit)
            unit.take_grads(indices, collected.places, collected.written)

    def provide(self, unit: HZPUnit) -> None:
        """The backward of `unit` begins: let its layers find the places of their gradients."""
        if unit.reduces_in_place:
            unit.point_main_grads_at(unit.whole_grads)
            return
        collected = self._collect(unit)
        if not unit.overwrites_main_grads:
            unit.zero_rest(collected.places, (), collected.written)
            collected.written.update(range(len(unit.params)))
        unit.point_main_grads_at(collected.places)

    def _collect(self, unit: HZPUnit) -> _Collected:
        """fp32 memory for this micro-batch's full gradients of `unit`."""
        collected = self._collected.get(unit)
        if collected is None:
            while (slot := self.rings.acquire(unit)) is None and self._reductions:
                self._await_oldest_reduction()
            # All slots are being filled: one unit collects to the end of backward, say the norm
            # behind the layers, and another of its size begins.
            slot = slot or self.rings.grow(unit)
            places = slot.views_for(unit.views_key, unit.views_of)
            collected = self._collected[unit] = _Collected(slot, places, set())
        return collected

    def has_pending(self, unit: HZPUnit) -> bool:
        """Whether gradients of this micro-batch are there that are not on their way yet."""
        return unit in self._collected or unit.has_grads

    def start_reduction(self, unit: HZPUnit) -> None:
        """Reduce the gradients of `unit` over the G axes; the lane adds them to main_grad."""
        if unit in self._syncs:
            raise RuntimeError(
                f"{unit.name}: a gradient came after the one of the last micro-batch; leave the "
                "no_sync() context only for the last one"
            )
        self.take(unit, range(len(unit.params)))
        if unit.reduces_in_place:
            return
        slot, places, written = self._collect(unit)
        del self._collected[unit]
        gaps = slot.views_for(f"between {unit.views_key}", unit.gaps_of)
        unit.zero_rest(places, gaps, written)
        task = self._driver.submit(
            Task(
                "reduce",
                unit.name,
                unit.groups.grad_reduce,
                lambda: unit.reduce_steps(slot.storage, slot.scratch),
                ready=(self._driver.device.record_event(),),
            )
        )
        self._reductions.append((unit, slot, task))
        self._last_reduction[unit] = task

    def _await_oldest_reduction(self) -> None:
        unit, slot, task = self._reductions.popleft()
        task.wait()
        self.rings.release(unit, slot)

    # ---- the last micro-batch

    def is_syncing(self, unit: HZPUnit) -> bool:
        """Whether this step's reduction over the whole sharding group was submitted."""
        return unit in self._syncs

    def start_sync(
        self, unit: HZPUnit, update: Update | None = None, after: Sequence[Task | None] = ()
    ) -> Task:
        """Reduce what all micro-batches added up over the whole sharding group.

        update: called with the unit when that is done, and with it after `after`.
        """

        def steps() -> Steps:
            yield from unit.sync_grad_steps(self._scale)
            if update is not None:
                update(unit)

        self._syncs[unit] = self._driver.submit(
            Task(
                "grad-sync",
                unit.name,
                (*unit.groups.grad_sync, *unit.groups.replica_sync),
                steps,
                ready=(self._driver.device.record_event(),),
                after=(self._last_reduction.get(unit), *after),
            )
        )
        return self._syncs[unit]

    # ---- the step

    def _finish_reductions(self) -> None:
        while self._reductions:
            self._await_oldest_reduction()

    def _await_syncs(self) -> None:
        for sync in self._syncs.values():
            sync.wait()

    def finish(self) -> None:
        """Return when every reduction that was started has ended."""
        self._finish_reductions()
        self._await_syncs()

    def begin_step(self) -> None:
        """A step begins, or begins again: of the last one nothing is left in flight or in slots."""
        self._finish_reductions()
        for unit, collected in self._collected.items():
            self.rings.release(unit, collected.slot)
        self._collected.clear()
        self._await_syncs()
        self._syncs.clear()
        self._last_reduction.clear()
