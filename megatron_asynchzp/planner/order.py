# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the order of a step: what the main thread of a rank computes and submits, one action after
the other. It repeats the decisions of zero/gathers.py and zero/reductions.py, which depend on the
order of the program alone; a test compares both on random programs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class OrderUnit:
    """What the order depends on of a unit.

    slot: equal for units that fit the same slots; is_gathered: its parameter shard is a part; is_
    reduced: its gradient shard is; reduces_at_end: only the end of backward completes its gradient
    (units of several modules, and those whose modules contain others).
    """

    slot: object
    is_gathered: bool = True
    is_reduced: bool = True
    is_trained: bool = True
    reduces_at_end: bool = False


@dataclass(frozen=True)
class Visit:
    """A call of the module that holds the unit `unit`, with those inside it, in their order."""

    unit: int
    inner: tuple["Visit", ...] = ()


class Phase(NamedTuple):
    """Forward or backward of one micro-batch through one model chunk.

    is_last: the micro-batch after which the chunk's gradients are reduced over all ranks.
    """

    is_forward: bool
    chunk: int
    micro_batch: int
    is_last: bool = False


@dataclass(frozen=True)
class Schedule:
    """depth: units of each size gathered ahead, 0 for the inline schedule; param_slots: 0 for
    depth + 1; grad_slots: full gradients in flight, of each size; overlaps_params: whether a step
    begins before all parameter shards are rebuilt, as the engine's does; is_inline: nothing runs
    beside the computation (the depth is then 0)."""

    depth: int = 1
    param_slots: int = 0
    grad_slots: int = 2
    overlaps_params: bool = True
    is_inline: bool = False


COMPUTE, GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC = range(5)
"""Kinds of actions; the last four are lanes of their own."""


class Action(NamedTuple):
    """The main thread computes with a unit, or submits an operation on it.

    after: earlier actions, by index, that must have ended before this one begins: results that it
    reads, and the last use of the slot that it writes; phase: index of the phase.
    """

    kind: int
    unit: int
    after: tuple[int, ...]
    phase: int


class StepOrder:
    """The actions of one step in the steady state, from the optimizer on.

        param-sync   | u0 | u1 | u2 |
        gather            | u0 | u1 | ...
        compute                | F u0 | F u1 | ... | B u1 | B u0 |
        reduce                                          | u1 | u0 |
        grad-sync                                            | u1 | u0 |

    units: of all chunks; visits: of each chunk, in the order of the forward; phases: of the step.

    actions: see Action; waits: what the optimizer waits for at the end, by index.
    """

    def __init__(
        self,
        units: Sequence[OrderUnit],
        visits: Sequence[Sequence[Visit]],
        phases: Sequence[Phase],
        schedule: Schedule,
    ):
        self.units, self.schedule = units, schedule
        self.actions: list[Action] = []
        self._phase = -1
        self._last_compute: int | None = None
        self._last_reduction: dict[int, int] = {}
        self._grad_syncs: dict[int, int] = {}
        self._chunks = [_Chunk(self, visits[chunk], chunk) for chunk in range(len(visits))]
        slots = Counter((chunk.key, units[u].slot) for chunk in self._chunks for u in chunk.units)
        self._free_grads = {key: min(n, schedule.grad_slots) for key, n in slots.items()}
        for chunk in self._chunks:
            chunk.expect(phases)
        for chunk in self._chunks:
            chunk.start_syncs()
        self._first_after = () if schedule.overlaps_params else tuple(range(len(self.actions)))
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
        self._last_compute = self.submit(COMPUTE, unit, (*after, *self._first_after))
        self._first_after = ()
        return self._last_compute

    def take_grad_slot(self, chunk: "_Chunk", unit: int) -> list[int]:
        """The reductions that end before the gradients of `unit` find a slot."""
        if not self.units[unit].is_reduced:
            return []
        key, waited = (chunk.key, self.units[unit].slot), []
        while self._free_grads[key] == 0 and chunk.reductions:
            other, reduction = chunk.reductions.popleft()
            waited.append(reduction)
            self._free_grads[chunk.key, self.units[other].slot] += 1
        self._free_grads[key] = max(0, self._free_grads[key] - 1)
        return waited

    def start_reduction(self, chunk: "_Chunk", unit: int, computed: int, is_last: bool) -> None:
        if self.units[unit].is_reduced:
            reduction = self.submit(REDUCE, unit, [computed])
            chunk.reductions.append((unit, reduction))
            self._last_reduction[unit] = reduction
        if is_last:
            self.start_grad_sync(unit)

    def start_grad_sync(self, unit: int) -> None:
        after = (self._last_compute, self._last_reduction.get(unit))
        self._grad_syncs[unit] = self.submit(GRAD_SYNC, unit, after)

    @property
    def last_compute(self) -> int | None:
        return self._last_compute


class _Chunk:
    """The units in flight of one model chunk, as Gathers and Reductions have them."""

    def __init__(self, order: StepOrder, visits: Sequence[Visit], key: int):
        self.key = key
        self._order, self._visits = order, visits
        self._all, self._schedule = order.units, order.schedule
        self.units = list(dict.fromkeys(_units_of(visits)))
        self.reductions: deque[tuple[int, int]] = deque()
        self._sequence: list[int] = []
        self._place = 0
        gathered = [unit for unit in self.units if self._all[unit].is_gathered]
        equal = Counter(self._all[unit].slot for unit in gathered)
        most = self._schedule.param_slots or self._schedule.depth + 1
        # What frees a slot: the last computation with it.
        self._free: dict[object, deque[int | None]] = {
            slot: deque([None] * min(count, most)) for slot, count in equal.items()
        }
        self._gathers: dict[int, int] = {}
        self._kept: dict[int, None] = {}
        self._active: dict[int, int] = {}  # unsharded units, with the gather that they had
        self._ahead: Counter[object] = Counter()
        self._used_at: dict[int, int] = {}
        self._syncs: dict[int, int] = {}

    def expect(self, phases: Sequence[Phase]) -> None:
        """The uses of gathered units in a step."""
        forward = list(_uses(self._visits, is_forward=True))
        backward = list(_uses(self._visits, is_forward=False))
        for phase in phases:
            if phase.chunk == self.key:
                for unit in forward if phase.is_forward else backward:
                    if self._all[unit].is_gathered:
                        self._sequence.append(unit)

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
            self._order.start_reduction(self, unit, computed, phase.is_last)

    def _forward(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            self._compute(visit.unit)
            self._forward(visit.inner)
            self._release(visit.unit)

    def _backward(self, visits: Sequence[Visit], is_last: bool, at_end: list) -> None:
        for visit in reversed(visits):
            unit = self._all[visit.unit]
            waited = self._order.take_grad_slot(self, visit.unit) if unit.is_trained else []
            computed = self._compute(visit.unit, waited)
            self._backward(visit.inner, is_last, at_end)
            last = self._order.last_compute if visit.inner else computed
            if unit.is_trained and unit.reduces_at_end:
                at_end.append((visit.unit, computed))
                self._release(visit.unit)
            else:
                self._release(visit.unit)
                if unit.is_trained:
                    self._order.start_reduction(self, visit.unit, last or computed, is_last)

    def _compute(self, unit: int, after: Sequence[int] = ()) -> int:
        gather = self._use(unit)
        computed = self._order.compute(unit, (*after, gather))
        self._used_at[unit] = computed
        return computed

    # ---- Gathers

    def _use(self, unit: int) -> int | None:
        """What the main thread waits for."""
        if not self._all[unit].is_gathered:
            return self._syncs.pop(unit, None)
        if unit in self._active and unit not in self._kept:
            return self._active[unit]
        self._place += 1
        if unit in self._kept:
            del self._kept[unit]
        else:
            if unit not in self._gathers:
                self._gather(unit, self._acquire(unit))
            self._active[unit] = self._gathers.pop(unit)
            self._ahead[self._all[unit].slot] -= 1
        self._prefetch()
        return self._active[unit]

    def _release(self, unit: int) -> None:
        if unit not in self._active or unit in self._kept:
            return
        if self._is_next(unit):
            self._kept.setdefault(unit)
        else:
            self._drop(unit)
        self._prefetch()

    def _is_next(self, unit: int) -> bool:
        for following in self._upcoming():
            if following == unit:
                return True
            if following not in self._gathers and following not in self._active:
                return False
        return False

    def _upcoming(self) -> Iterator[int]:
        sequence = self._sequence
        for place in range(self._place, min(self._place + len(self.units), len(sequence))):
            yield sequence[place]

    def _drop(self, unit: int) -> None:
        self._kept.pop(unit, None)
        del self._active[unit]
        self._free[self._all[unit].slot].append(self._used_at[unit])

    def _acquire(self, unit: int) -> int | None:
        slot = self._all[unit].slot
        free = self._free[slot]
        if free:
            return free.popleft()
        for spare in [*self._gathers, *self._kept]:
            if self._all[spare].slot == slot:
                if spare in self._kept:
                    self._drop(spare)
                else:
                    free.append(self._gathers.pop(spare))
                    self._ahead[slot] -= 1
                break
        return free.popleft() if free else None  # one more slot, for good

    def _gather(self, unit: int, freed_by: int | None) -> None:
        self._ahead[self._all[unit].slot] += 1
        after = (freed_by, self._syncs.pop(unit, None))
        self._gathers[unit] = self._order.submit(GATHER, unit, after)

    def _prefetch(self, among: set[int] | None = None) -> None:
        gathers, active, depth = self._gathers, self._active, self._schedule.depth
        for unit in self._upcoming():
            if unit in gathers or unit in active:
                continue
            slot = self._all[unit].slot
            if among is not None and unit not in among:
                return
            if self._ahead[slot] >= depth or not self._free[slot]:
                return
            self._gather(unit, self._free[slot].popleft())


def _units_of(visits: Sequence[Visit]) -> Iterator[int]:
    for visit in visits:
        yield visit.unit
        yield from _units_of(visit.inner)


def _uses(visits: Sequence[Visit], is_forward: bool) -> Iterator[int]:
    for visit in visits if is_forward else reversed(visits):
        yield visit.unit
        yield from _uses(visit.inner, is_forward)
