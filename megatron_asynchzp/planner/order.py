# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the order of a step: what the main thread of a rank computes and submits, one action after
the other. It repeats the decisions of zero/gathers.py and zero/reductions.py, which depend on the
order of the program alone; a test compares both on random programs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from megatron_asynchzp.planner.places import Place, Places, Span
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
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.in_flight import (
    ALIGNMENT_NBYTES,
    memory_in_flight,
    needed_together,
    seen_from_top,
)
from megatron_asynchzp.sharding.residency import Residency


class StepOrder:
    """The actions of one step in the steady state, from the optimizer on.

        param-sync   | u0 | u1 | u2 |
        gather            | u0 | u1 | ...
        compute                | F u0 | F u1 | ... | B u1 | B u0 |
        reduce                                          | u1 | u0 |
        grad-sync                                            | u1 | u0 |

    units: of all chunks; visits: of each chunk, in the order of the forward; phases: of the step;
    overlaps_params: whether it begins before all parameter shards are rebuilt, as the engine's.

    actions: see Action; waits: what the optimizer waits for at the end, by index.
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
        self._last_compute: int | None = None
        self._last_reduction: dict[int, int] = {}
        self._grad_syncs: dict[int, int] = {}
        self.kept_params = self.kept_grads = None
        self.shared_params: Places | None = None
        if budget := schedule.keep_params_nbytes:
            self.kept_params = Residency[int](budget, lambda unit: units[unit].memory.params)
            self.shared_params = Places(budget // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES)
        if budget := schedule.keep_grads_nbytes:
            sum_nbytes = lambda unit: units[unit].sum_nbytes  # noqa: E731
            self.kept_grads = Residency[int](budget, sum_nbytes, counts_own=True)
        self._chunks = [_Chunk(self, visits[chunk], chunk) for chunk in range(len(visits))]
        for phase in phases:
            self._chunks[phase.chunk].expect(phase)
        for residency in (self.kept_params, self.kept_grads):
            if residency is not None:
                residency.restart()
        for chunk in self._chunks:
            chunk.start_syncs()
        self.waited: tuple[int, ...] = ()  # by the main thread, before it computes again
        if not overlaps_params:
            self.waited = tuple(range(len(self.actions)))
        for self._phase, phase in enumerate(phases):
            self._chunks[phase.chunk].run(phase)
        self._phase = len(phases)
        for chunk in self._chunks:
            for unit in chunk.units:
                if units[unit].is_trained and unit not in self._grad_syncs:
                    self.start_grad_sync(unit)
        self.waits = list(self._last_reduction.values()) + list(self._grad_syncs.values())

    # ---- for the chunks

    def submit(self, kind: int, unit: int, after: Iterable[int | None]) -> int:
        """The index of the new action."""
        deps = {one for one in after if one is not None}
        if self.schedule.is_inline and self.actions:
            deps.add(len(self.actions) - 1)
        self.actions.append(Action(kind, unit, tuple(deps), self._phase))
        return len(self.actions) - 1

    def compute(self, unit: int, after: Iterable[int | None]) -> int:
        self._last_compute = self.submit(COMPUTE, unit, (*after, *self.waited))
        self.waited = ()
        return self._last_compute

    def reduce(self, chunk: "_Chunk", unit: int, computed: int, is_last: bool) -> None:
        if self.units[unit].is_reduced:
            if self.kept_grads is not None:
                self.kept_grads.visit(unit)
                if not is_last and self.kept_grads.keeps(unit):
                    return
            span = chunk.take_grad_memory(unit)
            reduction = self.submit(REDUCE, unit, [computed])
            chunk.reductions.append((unit, span, reduction))
            self._last_reduction[unit] = reduction
        if is_last:
            self.start_grad_sync(unit)

    def start_grad_sync(self, unit: int) -> None:
        after = (self._last_compute, self._last_reduction.get(unit))
        self._grad_syncs[unit] = self.submit(GRAD_SYNC, unit, after)

    @property
    def last_compute(self) -> int | None:
        return self._last_compute

    def spares(self, chunk: "_Chunk") -> list[tuple["_Chunk", int]]:
        """As Gathers._spares."""
        others = [] if self.shared_params is None else [c for c in self._chunks if c is not chunk]
        all_kept = [(one, unit) for one in (*others, chunk) for unit in one.kept]
        return [
            *((one, unit) for one, unit in all_kept if self.is_to_stay(unit)),
            *((one, unit) for one in others for unit in one.gathers),
            *((one, unit) for one, unit in all_kept if not self.is_to_stay(unit)),
            *((chunk, unit) for unit in chunk.gathers),
        ]

    def is_to_stay(self, unit: int) -> bool:
        return self.kept_params is not None and self.kept_params.keeps(unit)


class _Chunk:
    """The units in flight of one model chunk, as Gathers and Reductions have them."""

    def __init__(self, order: StepOrder, visits: Sequence[Visit], key: int):
        self.key = key
        self._order, self._visits = order, visits
        self._all, self._schedule = order.units, order.schedule
        self.units = list(dict.fromkeys(in_use_order(visits, is_forward=True)))
        self.reductions: deque[tuple[int, Span, int]] = deque()
        self._sequence: list[int] = []
        self._place = 0
        in_order = sorted(self.units)
        memory = memory_in_flight(
            [self._all[unit].memory for unit in in_order],
            self._schedule.depth,
            budget=self._schedule.in_flight_nbytes,
        )
        together = needed_together([self._all[unit].memory for unit in in_order])
        self._needed_with = {
            in_order[index]: [in_order[other] for other in others]
            for index, others in together.items()
        }
        at_top = seen_from_top([self._all[unit].memory.params for unit in in_order])
        self._is_at_top = dict(zip(in_order, at_top, strict=True))
        self._grads = Places(memory.grads)
        if order.shared_params is None:
            self._params = Places(memory.params)
        else:
            self._params = order.shared_params
            self._params.grow(memory.params)
        self._spans: dict[int, Span] = {}
        self.gathers: dict[int, int] = {}
        self.kept: dict[int, None] = {}
        self._active: dict[int, int] = {}  # unsharded units, with the gather that they had
        self._ahead: Counter[object] = Counter()
        self._used_at: dict[int, int] = {}
        self._syncs: dict[int, int] = {}

    def expect(self, phase: Phase) -> None:
        """What the phase uses, as the step before had it."""
        order = self._order
        for unit in in_use_order(self._visits, phase.is_forward):
            if self._all[unit].is_gathered:
                self._sequence.append(unit)
                if order.kept_params is not None:
                    order.kept_params.visit(unit)
        if order.kept_grads is None or phase.is_forward:
            return
        completed = list(in_completion_order(self._visits))
        at_end = [unit for unit in completed if self._all[unit].reduces_at_end]
        for unit in [unit for unit in completed if unit not in at_end] + sorted(at_end):
            if self._all[unit].is_trained and self._all[unit].is_reduced:
                order.kept_grads.visit(unit)

    def start_syncs(self) -> None:
        synced = {unit for unit in self.units if not self._all[unit].is_trained}
        for unit in self.units:
            if self._all[unit].is_trained:
                self._syncs[unit] = self._order.submit(PARAM_SYNC, unit, ())
                synced.add(unit)
            self._prefetch(synced)
        self._prefetch()

    # ---- phases

    def run(self, phase: Phase) -> None:
        if phase.is_forward:
            self._forward(self._visits)
            return
        at_end: list[tuple[int, int]] = []
        self._backward(self._visits, phase.is_last, at_end)
        for unit, computed in sorted(at_end):
            self._order.reduce(self, unit, computed, phase.is_last)

    def _forward(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            self._compute(visit.unit)
            self._forward(visit.inner)
            self._release(visit.unit)

    def _backward(self, visits: Sequence[Visit], is_last: bool, at_end: list) -> None:
        for visit in reversed(visits):
            unit = self._all[visit.unit]
            computed = self._compute(visit.unit)
            self._backward(visit.inner, is_last, at_end)
            last = self._order.last_compute if visit.inner else computed
            if unit.is_trained and unit.reduces_at_end:
                at_end.append((visit.unit, computed))
                self._release(visit.unit)
            else:
                self._release(visit.unit)
                if unit.is_trained:
                    self._order.reduce(self, visit.unit, last or computed, is_last)

    def _compute(self, unit: int) -> int:
        gather = self._use(unit)
        computed = self._order.compute(unit, (gather,))
        self._used_at[unit] = computed
        return computed

    # ---- Gathers

    def _use(self, unit: int) -> int | None:
        """What the main thread waits for."""
        if not self._all[unit].is_gathered:
            return self._syncs.pop(unit, None)
        if unit in self._active and unit not in self.kept:
            return self._active[unit]
        self._place += 1
        if self._order.kept_params is not None:
            self._order.kept_params.visit(unit)
        if unit in self.kept:
            del self.kept[unit]
        else:
            if unit not in self.gathers:
                self._gather(unit, self._acquire(unit))
            self._active[unit] = self.gathers.pop(unit)
            self._ahead[self._all[unit].size] -= 1
        self._prefetch()
        return self._active[unit]

    def _release(self, unit: int) -> None:
        if unit not in self._active or unit in self.kept:
            return
        if self._is_next(unit) or self._order.is_to_stay(unit):
            self.kept.setdefault(unit)
        else:
            self._drop(unit)
        self._prefetch()

    def _is_next(self, unit: int) -> bool:
        for following in self._upcoming():
            if following == unit:
                return True
            if following not in self.gathers and following not in self._active:
                return False
        return False

    def _upcoming(self) -> Iterator[int]:
        sequence = self._sequence
        for place in range(self._place, min(self._place + len(self.units), len(sequence))):
            yield sequence[place]

    def _drop(self, unit: int) -> None:
        self.kept.pop(unit, None)
        del self._active[unit]
        self._params.release(self._spans.pop(unit), self._used_at[unit])

    def _drop_spare(self, unit: int) -> None:
        if unit in self.kept:
            self._drop(unit)
            return
        gather = self.gathers.pop(unit)
        self._ahead[self._all[unit].size] -= 1
        self._order.waited += (gather,)
        self._params.release(self._spans.pop(unit), gather)

    def _acquire(self, unit: int) -> Place:
        spares = self._order.spares(self)
        while (place := self._acquire_free(unit, leaves_room=bool(spares))) is None:
            if spares:
                chunk, spare = spares.pop()
                chunk._drop_spare(spare)
            else:
                self._params.grow(self._all[unit].memory.params)
        return place

    def _acquire_free(self, unit: int, leaves_room: bool = True) -> Place | None:
        if leaves_room and not self._leaves_room(unit):
            return None
        return self._params.acquire(self._all[unit].memory.params, self._is_at_top[unit])

    def _leaves_room(self, unit: int) -> bool:
        others = self._needed_with.get(unit, ())
        if not (missing := [other for other in others if other not in self._spans]):
            return True
        held = [self._spans[other] for other in others if other in self._spans]
        more = [(self._all[other].memory.params, self._is_at_top[other]) for other in missing]
        nbytes = self._all[unit].memory.params
        return self._params.leaves_room(nbytes, self._is_at_top[unit], held, more)

    def _gather(self, unit: int, place: Place) -> None:
        self._ahead[self._all[unit].size] += 1
        self._spans[unit] = place.span
        after = (*place.after, self._syncs.pop(unit, None))
        self.gathers[unit] = self._order.submit(GATHER, unit, after)

    def _prefetch(self, among: set[int] | None = None) -> None:
        gathers, active, depth = self.gathers, self._active, self._schedule.depth
        for unit in self._upcoming():
            if unit in gathers or unit in active:
                continue
            if among is not None and unit not in among:
                return
            if self._ahead[self._all[unit].size] >= depth:
                return
            place = self._acquire_free(unit)
            if place is None:
                return
            self._gather(unit, place)

    # ---- Reductions

    def take_grad_memory(self, unit: int) -> Span:
        """For a piece of the gradients of `unit`; waits for reductions that hold it."""
        memory = self._all[unit].memory
        if memory.num_pieces > 1:
            while any(self._all[other].memory.num_pieces > 1 for other, _, _ in self.reductions):
                self._await_oldest_reduction()
        while (place := self._grads.acquire(memory.grads, from_top=False)) is None:
            if self.reductions:
                self._await_oldest_reduction()
            else:
                self._grads.grow(memory.grads)
        return place.span

    def _await_oldest_reduction(self) -> None:
        _, span, reduction = self.reductions.popleft()
        self._order.waited += (reduction,)
        self._grads.release(span, None)
