# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the step of one model chunk: which unit is gathered, reduced and released when.
Must not know Megatron.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.comm.collectives import run_steps
from megatron_asynchzp.comm.driver import Driver, OnFailure, new_driver
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.timeline import COMPUTE, Timeline
from megatron_asynchzp.device import Device, device_of
from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.hooks import attach_grad_hooks, attach_unit_hooks
from megatron_asynchzp.zero.plan import UnitPlan
from megatron_asynchzp.zero.saved_views import SavedViews
from megatron_asynchzp.zero.step import UnitScheduler
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass
class _MicroBatch:
    """What the runtime knows of the forward and backward that run now."""

    in_backward: bool = False
    forward_depth: Counter[HZPUnit] = field(default_factory=Counter)
    forward_calls: Counter[HZPUnit] = field(default_factory=Counter)
    started_backward: set[HZPUnit] = field(default_factory=set)
    compute_marks: dict[tuple[str, HZPUnit], Any] = field(default_factory=dict)


def start_driver(
    schedule: ScheduleConfig, device: Device, on_failure: OnFailure | None = None
) -> Driver:
    """The driver that a schedule asks for, with a timeline of its own."""
    return new_driver(schedule.kind, Timeline(device), schedule.time_limit_s, on_failure)


class HZPRuntime:
    """The sharded engine around one module (a model chunk).

        forward    unit:  unshard | compute | reshard
        backward   unit:  unshard | compute | reshard, reduce gradients (G axes)
        last one   unit:  and then G to O and over the replicas
        step       all:   sync_grads (wait) | optimizer | sync_params (O to P)

    Every rank of a sharding group runs the same units in the same order, hence issues the same
    collectives in the same order (law 3).

    root: the module whose call is one forward; plans: a partition of its parameters;
    groups: communicators by group key of the plans; driver: who runs the collectives, where
    several runtimes of a rank share one; grad_scale: factor on the summed gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        plans: Sequence[UnitPlan],
        groups: dict[str, ShardGroups],
        schedule: ScheduleConfig = ScheduleConfig(),
        driver: Driver | None = None,
        grad_scale: float = 1.0,
    ):
        self.units: list[HZPUnit] = []
        self.group_keys: dict[HZPUnit, str] = {}
        self._saved_views = SavedViews(on_missing=self._unshard)
        self._batch = _MicroBatch()
        self._reduce_last: set[HZPUnit] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        units_of: dict[nn.Module, list[HZPUnit]] = {root: []}
        for plan in plans:
            unit = HZPUnit(plan.name, plan.params, groups[plan.group_key])
            self.units.append(unit)
            self.group_keys[unit] = plan.group_key
            if len(plan.modules) > 1:
                self._reduce_last.add(unit)
            for module in plan.modules:
                units_of.setdefault(module, []).append(unit)
        self._owns_driver = driver is None
        if driver is None:
            driver = start_driver(schedule, device_of(self.units[0].model_param.storage))
        self.scheduler = UnitScheduler(self.units, schedule, driver, grad_scale)
        self._attach(root, units_of)

    def _attach(self, root: nn.Module, units_of: dict[nn.Module, list[HZPUnit]]) -> None:
        # The hooks are owned by the model, the runtime by the wrapper: a proxy breaks the cycle.
        events = weakref.proxy(self)
        # Registered before the units' own hooks and prepended after them: runs first.
        for module, units in units_of.items():
            self._handles += attach_unit_hooks(module, units, events)
        self._handles.append(
            root.register_forward_pre_hook(lambda *_: events.begin_forward(), prepend=True)
        )
        for unit in self.units:
            self._handles += attach_grad_hooks(unit, events)

    # ---- one micro-batch

    def begin_forward(self) -> None:
        """The root is called: a new micro-batch, or a recomputation within backward."""
        if not self._batch.in_backward:
            self._batch.forward_calls.clear()
            self._batch.forward_depth.clear()
            if not torch.is_grad_enabled():
                self.scheduler.begin_evaluation()

    def before_forward(self, units: list[HZPUnit]) -> None:
        # First what after_forward undoes, then what can fail.
        self._saved_views.push()
        self._batch.forward_depth.update(units)
        for unit in units:
            if not self._batch.in_backward:
                self._batch.forward_calls[unit] += 1
                if self._batch.forward_calls[unit] > 1:
                    self._reduce_last.add(unit)  # its gradient is complete with the first call's
            self._unshard(unit)
        self._mark_compute("forward", units)

    def after_forward(self, units: list[HZPUnit]) -> None:
        self._saved_views.pop()
        if self.scheduler.driver.has_failed():
            return  # this hook runs for the failure too, and has nothing to add to it
        self._note_compute("forward", units)
        for unit in units:
            self._batch.forward_depth[unit] -= 1
            # A recomputation in backward is followed by that unit's backward: keep it gathered.
            if self._batch.forward_depth[unit] == 0 and not self._batch.in_backward:
                self._reshard(unit)

    def before_backward(self, units: list[HZPUnit]) -> None:
        if not self._batch.in_backward:
            self._batch.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for unit in units:
            self._batch.started_backward.add(unit)
            self._unshard(unit)
        self._mark_compute("backward", units)

    def after_backward(self, units: list[HZPUnit]) -> None:
        self._note_compute("backward", units)
        for unit in units:
            self._reshard(unit)
            if unit not in self._reduce_last:
                self._reduce(unit)

    def grad_ready(self, unit: HZPUnit, index: int) -> None:
        self.scheduler.take_grad(unit, index)

    def _end_backward(self) -> None:
        """Autograd is done with this micro-batch: whatever is left is reduced in unit order."""
        self._note_compute("backward", self.units)
        for unit in self.units:
            if unit in self._batch.started_backward or self.scheduler.has_pending_grads(unit):
                self._reduce(unit)
            self._reshard(unit)
        self._batch.started_backward.clear()
        self._batch.in_backward = False

    def _mark_compute(self, direction: str, units: list[HZPUnit]) -> None:
        timeline = self.scheduler.driver.timeline
        if timeline.is_capturing:
            for unit in units:
                self._batch.compute_marks.setdefault((direction, unit), timeline.device.mark())

    def _note_compute(self, direction: str, units: list[HZPUnit]) -> None:
        """Units whose computation of this direction has ended now, if somebody watches."""
        timeline = self.scheduler.driver.timeline
        for unit in units if self._batch.compute_marks else ():
            start = self._batch.compute_marks.pop((direction, unit), None)
            if start is not None:
                timeline.add(COMPUTE, f"{direction} {unit.name}", start, timeline.device.mark())

    def _unshard(self, unit: HZPUnit) -> None:
        self.scheduler.use(unit)
        self._saved_views.track(unit)

    def _reshard(self, unit: HZPUnit) -> None:
        self.scheduler.release(unit)

    def _reduce(self, unit: HZPUnit) -> None:
        self.scheduler.reduce(unit)
        self._batch.started_backward.discard(unit)

    # ---- one step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro-batches of a step but the last.

        When it is left, the next micro-batch is the last one: each unit's gradients are then
        reduced over the whole sharding group while backward goes on. A loop that never enters it
        gets the same numbers; all of that reduction then happens in `sync_grads`.
        """
        self.scheduler.is_last_micro_batch = False
        yield
        self.scheduler.is_last_micro_batch = True

    def update_in_backward(self, update: Callable[[HZPUnit], None]) -> None:
        """Call `update(unit)` as soon as a unit's main_grad fragments are complete.

        It is to apply an optimizer to the unit's `owned_params`, and runs on a background thread
        while backward goes on; a third of the parameter shards is rebuilt there too. For
        optimizers that need no norm over all gradients, and steps that are never taken back. Call
        `sync_grads` and `sync_params` as without it.
        """
        self.scheduler.update = update

    def zero_grads(self) -> None:
        """Start a step, or start it again: forget all gradients and any unfinished backward."""
        self._batch = _MicroBatch()
        self.scheduler.restart()
        for unit in self.units:
            unit.zero_grads()

    def sync_grads(self) -> None:
        """After the last micro-batch: main_grad fragments become the sum over all ranks x scale."""
        self.scheduler.sync_grads()
        self.scheduler.check_order()

    def sync_params(self) -> None:
        """After the optimizer: model_param shards become the new main_param, in the background."""
        self.scheduler.sync_params()

    def settle(self) -> None:
        """Return when nothing is in flight: the units' states may be read or written now."""
        self.scheduler.driver.raise_failure()
        self.scheduler.settle()

    def complete_params(self) -> None:
        """Rebuild the parameter shards from their O ranges, which somebody has written.

        Between `settle` and the next forward. Collective over the sharding groups.
        """
        for unit in self.units:
            run_steps(unit.complete_param_steps())
        self.scheduler.params.note_written()

    def close(self) -> None:
        """Finish what is in flight and end the threads, unless the driver was handed in.

        Raises the failure that the communication ended with, without waiting for anything.
        """
        try:
            self.settle()
        finally:
            if self._owns_driver:
                self.scheduler.driver.close()

    def detach(self) -> None:
        """Close and remove every hook; the parameters stay sharded."""
        try:
            self.close()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def state_nbytes(self) -> dict[str, int]:
        """Bytes at rest on this rank, by state, over all units."""
        total: Counter[str] = Counter()
        for unit in self.units:
            total.update(unit.state_nbytes())
        return dict(total)
