# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Order in which the main thread of a rank computes and submits operations in a step.

The engine's own decisions (engine/sharding/decisions.py) say when a unit is gathered, kept and
waited for. A test compares the submissions of both on random programs.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.decisions import GradsInFlight, ParamsInFlight
from megatron_asynchzp.engine.sharding.early_units import BackwardRoom
from megatron_asynchzp.engine.sharding.in_flight import aligned, memory_in_flight
from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap
from megatron_asynchzp.engine.sharding.residency import Residency
from megatron_asynchzp.planner.program import (
    COMPUTE,
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    Action,
    OrderUnit,
    Phase,
    Visit,
    in_completion_order,
    in_use_order,
)

_Mark = tuple[int, ...]
"""Indices of actions that have ended when the main thread's stream reaches a point."""


class StepOrder:
    """The actions of a step in the steady state, from the optimizer on, without clipping.

        param-sync   | u0 | u1 | u2 |
        gather            | u0 | u1 | ...
        compute                | F u0 | F u1 | ... | B u1 | B u0 |
        reduce                                          | u1 | u0 |
        grad-sync                                            | u1 | u0 |
        param-sync                                                | u1 |  [Note: early update]

    units are those of all chunks, visits of each chunk in the order of the forward.
    overlaps_params: whether a step begins before all parameter shards are rebuilt.
    """

    def __init__(
        self,
        units: Sequence[OrderUnit],
        visits: Sequence[Sequence[Visit]],
        phases: Sequence[Phase],
        schedule: ScheduleConfig,
        overlaps_params: bool = True,
    ):
        self.units, self.schedule = units, schedule
        self.actions: list[Action] = []
        self._phase = -1
        self.last_compute: int | None = None
        self._last_reduction: dict[int, int] = {}
        self.grad_syncs: dict[int, int] = {}  # index of the action, by unit
        self.kept_params = self.kept_grads = None
        self.shared_params: MemoryMap[_Mark] | None = None
        if budget := schedule.keep_params_nbytes:
            self.kept_params = Residency[int](budget, lambda unit: units[unit].memory.params)
            self.shared_params = MemoryMap[_Mark](aligned(budget))
        if budget := schedule.keep_grads_nbytes:
            sum_nbytes = lambda unit: units[unit].sum_nbytes  # noqa: E731
            self.kept_grads = Residency[int](budget, sum_nbytes, counts_own=True)
        together: list[ParamsInFlight[int, _Mark, int]] = []
        self._chunks = [
            _Chunk(self, calls, [] if self.shared_params is None else together) for calls in visits
        ]
        for phase in phases:
            self._chunks[phase.chunk].expect(phase)
        for residency in (self.kept_params, self.kept_grads):
            if residency is not None:
                residency.restart()
        for chunk in self._chunks:
            chunk.params.start_syncs(chunk.early_units())
        self.waited: tuple[int, ...] = ()  # by the main thread, before it computes again
        if not overlaps_params:
            for chunk in self._chunks:
                chunk.params.rebuild_remaining()
            self.waited = tuple(range(len(self.actions)))
        for self._phase, phase in enumerate(phases):
            self._chunks[phase.chunk].run(phase)
        self._phase = len(phases)
        for chunk in self._chunks:
            for unit in chunk.units:
                if units[unit].is_trained and unit not in self.grad_syncs:
                    self.start_grad_sync(unit)
        # Indices of actions for which the optimizer waits at the end.
        self.waits = list(self._last_reduction.values()) + list(self.grad_syncs.values())
        self.waits += [preview for chunk in self._chunks for preview in chunk.params.previews]

    # ---- for the chunks

    def submit(self, kind: int, unit: int, after: Iterable[int | None]) -> int:
        deps = {action for action in after if action is not None}
        if self.schedule.is_inline and self.actions:
            deps.add(len(self.actions) - 1)
        self.actions.append(Action(kind, unit, tuple(deps), self._phase))
        return len(self.actions) - 1

    def compute(self, unit: int, after: Iterable[int | None]) -> int:
        self.last_compute = self.submit(COMPUTE, unit, (*after, *self.waited))
        self.waited = ()
        return self.last_compute

    def reduce(self, chunk: "_Chunk", unit: int, computed: int | None, is_last: bool) -> None:
        if self.units[unit].is_reduced:
            if chunk.grads.should_wait(unit, is_last):
                return
            memory = self.units[unit].memory
            extent = chunk.grads.hold_extent(memory.grads, memory.num_pieces)
            reduction = self.submit(REDUCE, unit, [computed])
            chunk.grads.note_started(reduction, extent, has_more=memory.num_pieces > 1)
            self._last_reduction[unit] = reduction
        if is_last:
            self.start_grad_sync(unit)
            if unit in chunk.params.early:
                chunk.params.send_early(unit)

    def start_grad_sync(self, unit: int) -> None:
        after = (self.last_compute, self._last_reduction.get(unit))
        self.grad_syncs[unit] = self.submit(GRAD_SYNC, unit, after)

    def mark(self) -> _Mark:
        """Return the actions for which an event on the main thread's stream would wait now."""
        last = () if self.last_compute is None else (self.last_compute,)
        return (*last, *self.waited)

    def await_action(self, action: int) -> None:
        self.waited += (action,)


class _Params(ParamsInFlight[int, _Mark, int]):
    """Decides about gathers of a chunk's units, and adds them to `order`."""

    def __init__(
        self,
        order: StepOrder,
        units: Sequence[int],
        memory: MemoryMap[_Mark],
        chunks: list[ParamsInFlight[int, _Mark, int]],
    ):
        self._order, self._units = order, units
        self._syncs: dict[int, int] = {}
        self.early: set[int] = set()
        self.previews: list[int] = []
        super().__init__(
            {unit: order.units[unit].memory for unit in sorted(units)},
            {unit: order.units[unit].size for unit in units},
            order.schedule.depth,
            memory,
            chunks,
            order.kept_params,
        )

    def start_syncs(self, early: set[int]) -> None:
        """Begin a step which sends the units `early` before its update."""
        self.early = early
        trained = [unit for unit in self._units if self._order.units[unit].is_trained]
        self.restart()
        self.rebuild(unit for unit in trained if unit not in early)

    def compute(self, unit: int) -> int:
        if self._order.units[unit].is_gathered:
            self.unshard(unit)
            waits_for = self._gathered[unit].handle
        else:
            self.rebuild_now(unit)
            waits_for = self._syncs.pop(unit, None)
            self.note_shard_used(unit)
        return self._order.compute(unit, (waits_for,))

    def start_unshard(self, unit: int, extent: Extent) -> int:
        users = chain.from_iterable(self._memory.pop_last_users(extent))
        after = (*users, self._syncs.pop(unit, None))
        return self._order.submit(GATHER, unit, after)

    def wait_for_unshard(self, unit: int, handle: int) -> None:
        """Do nothing: `compute` waits for the gather."""

    def finish_reshard(self, unit: int, handle: int) -> _Mark:
        return self._order.mark()

    def cancel_unshard(self, unit: int, handle: int) -> _Mark:
        self._order.await_action(handle)
        return self._order.mark()

    def start_param_sync(self, unit: int) -> None:
        self._syncs[unit] = self._order.submit(PARAM_SYNC, unit, ())

    def start_early_send(self, unit: int) -> None:
        gathered = self._gathered.get(unit)
        after = (self._order.grad_syncs[unit], None if gathered is None else gathered.handle)
        self.previews.append(self._order.submit(PARAM_SYNC, unit, after))


class _Grads(GradsInFlight[int, int]):
    """Decides for which reductions the main thread waits."""

    def __init__(self, order: StepOrder, memory: MemoryMap[object]):
        super().__init__(memory, order.kept_grads)
        self._order = order

    def await_reduction(self, reduction: int) -> None:
        self._order.await_action(reduction)


class _Chunk:
    """The program of a model chunk, as its modules' hooks have it; `together` share its memory."""

    def __init__(
        self,
        order: StepOrder,
        visits: Sequence[Visit],
        together: list[ParamsInFlight[int, _Mark, int]],
    ):
        self._order, self._visits, self._all = order, visits, order.units
        self.units = list(dict.fromkeys(in_use_order(visits, is_forward=True)))
        needs = [self._all[unit].memory for unit in sorted(self.units)]
        schedule = order.schedule
        memory = memory_in_flight(needs, schedule.depth, budget=schedule.in_flight_nbytes)
        shared = MemoryMap[_Mark]() if order.shared_params is None else order.shared_params
        before = shared.nbytes
        self.params = _Params(order, self.units, shared, together)
        shared.grow(memory.params - (shared.nbytes - before))  # seats have grown it already
        self.grads = _Grads(order, MemoryMap[object](memory.grads))

    def expect(self, phase: Phase) -> None:
        """Record the uses of a phase, as the previous step made them."""
        for unit in in_use_order(self._visits, phase.is_forward):
            if self._all[unit].is_gathered:
                self.params.skip(unit)
        kept_grads = self._order.kept_grads
        if kept_grads is None or phase.is_forward:
            return
        for unit in self._completed():
            if self._all[unit].is_reduced:
                kept_grads.visit(unit)

    def _completed(self) -> list[int]:
        completed = [
            unit for unit in in_completion_order(self._visits) if self._all[unit].is_trained
        ]
        at_end = [unit for unit in completed if self._all[unit].reduces_at_end]
        return [unit for unit in completed if unit not in at_end] + sorted(at_end)

    def early_units(self) -> set[int]:
        schedule, room = self._order.schedule, BackwardRoom()
        if not schedule.may_send_early:
            return set()
        is_forced = schedule.early_update == "on"
        return {
            unit
            for unit in self._completed()
            if room.should_send(self._all[unit].traffic, self._all[unit].may_be_early, is_forced)
        }

    def run(self, phase: Phase) -> None:
        if phase.is_forward:
            self._forward(self._visits)
            return
        at_end: list[int] = []
        self._backward(self._visits, phase.is_last, at_end)
        for unit in sorted(at_end):
            self._order.reduce(self, unit, self._order.last_compute, phase.is_last)

    def _forward(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            self.params.compute(visit.unit)
            self._forward(visit.inner)
            self.params.reshard(visit.unit)

    def _backward(self, visits: Sequence[Visit], is_last: bool, at_end: list[int]) -> None:
        for visit in reversed(visits):
            unit = self._all[visit.unit]
            computed = self.params.compute(visit.unit)
            self._backward(visit.inner, is_last, at_end)
            last = self._order.last_compute if visit.inner else computed
            self.params.reshard(visit.unit)
            if not unit.is_trained:
                continue
            if unit.reduces_at_end:
                at_end.append(visit.unit)
            else:
                self._order.reduce(self, visit.unit, last or computed, is_last)
