# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the gradients in flight: those that a unit has collected, the memory in which they are
reduced piece by piece, and what waits for that.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron_asynchzp.comm.arena import Arena, Place
from megatron_asynchzp.comm.collectives import Steps, split_for_reduction
from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.sharding.pieces import GradPiece
from megatron_asynchzp.zero.unit import HZPUnit

Update = Callable[[HZPUnit], None]
_Grads = dict[int, torch.Tensor]
"""Gradients of a unit in this micro-batch, by index of the parameter."""


class _Reduction(NamedTuple):
    """Under way. grads: what it has yet to read."""

    place: Place
    task: Task
    grads: _Grads


class _Provided(NamedTuple):
    """Where the layers of a unit put the gradients of their weights. place: in the arena."""

    place: Place | None
    places: list[torch.Tensor]


class Reductions:
    """Collects the gradients of units and reduces them.

        main        | B u2 | B u1 | ...
        reduce             | u2 | u1 |                                     gradients in flight
        grad-sync               | u2 | u1 |                                last micro-batch

    [Note: pieces] Autograd's gradients stay as they are until the unit is complete. Then the main
    thread casts and packs the first piece of them into a place of the arena, and the lane packs the
    next one there when that is reduced. Most units are a single piece. A unit of several keeps its
    gradients until its last one; so the next such unit begins when that one has ended.

        main        | B u1     | pack u1.0 | B u0 ...
        reduce                             | u1.0 | pack u1.1 | u1.1 | pack u1.2 | u1.2 |

    nbytes: of the arena, enough for one piece of any unit; pieces: of the gradients of each unit
    that is reduced; scale: factor on the summed gradients.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        nbytes: int,
        pieces: dict[HZPUnit, list[GradPiece]],
        driver: Driver,
        scale: float,
    ):
        self._driver, self._scale, self._pieces = driver, scale, pieces
        self._is_odd = {unit: bool(index % 2) for index, unit in enumerate(units)}
        self._collected: dict[HZPUnit, _Grads] = {}
        self._provided: dict[HZPUnit, _Provided] = {}
        self._reductions: deque[_Reduction] = deque()
        self._last_reduction: dict[HZPUnit, Task] = {}
        self._syncs: dict[HZPUnit, Task] = {}
        self.arena = Arena(nbytes, units[0].device, driver.device.record_event)

    # ---- one micro-batch

    def take(self, unit: HZPUnit, indices: Iterable[int]) -> None:
        """Collect the gradients of the parameters `indices`, as far as there are any; another one
        of the same parameter is added in fp32."""
        if unit.reduces_in_place:
            unit.add_grads(indices)
        else:
            provided = self._provided.get(unit)
            places = None if provided is None else provided.places
            unit.take_grads(indices, self._collected.setdefault(unit, {}), places)

    def provide(self, unit: HZPUnit) -> None:
        """The backward of `unit` begins: let its layers find the places of their gradients."""
        if unit.reduces_in_place:
            unit.point_main_grads_at(unit.whole_grads)
            return
        if (provided := self._provided.get(unit)) is None:
            provided = self._provided[unit] = self._new_places(unit)
            if not unit.overwrites_main_grads:
                torch._foreach_zero_(provided.places)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                self._collected[unit] = dict(enumerate(provided.places))
        unit.point_main_grads_at(provided.places)

    def _new_places(self, unit: HZPUnit) -> _Provided:
        """fp32 memory for the gradients of `unit`: where they are reduced, if that is at once and
        in one piece; else of their own, as autograd's gradients have it."""
        is_one_piece = unit.overwrites_main_grads and len(self._pieces[unit]) == 1
        if is_one_piece and (place := self._try_acquire_place(unit)) is not None:
            return _Provided(place, self._places(unit, 0, place)[: len(unit.params)])
        whole = torch.empty(unit.layout.padded_numel, dtype=torch.float32, device=unit.device)
        return _Provided(None, unit.views_of(whole))

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
        grads, pieces = self._collected.pop(unit), self._pieces[unit]
        provided = self._provided.pop(unit, None)
        place = None if provided is None else provided.place
        place = place or self._acquire_place(unit, pieces)
        self._pack(unit, 0, grads, place)
        if len(pieces) == 1:
            grads = {}
        task = self._driver.submit(
            Task(
                "reduce",
                unit.name,
                unit.groups.grad_reduce,
                partial(self._reduce_steps, unit, grads, place),
                ready=(self._driver.device.record_event(),),
            )
        )
        self._reductions.append(_Reduction(place, task, grads))
        self._last_reduction[unit] = task

    def _acquire_place(self, unit: HZPUnit, pieces: list[GradPiece]) -> Place:
        while len(pieces) > 1 and any(reduction.grads for reduction in self._reductions):
            self._await_oldest_reduction()
        if (place := self._try_acquire_place(unit)) is not None:
            return place
        # Layers of units that compute around this one hold the rest of it.
        self.arena.grow(unit.reduction_nbytes(pieces[0]))
        return self._acquire_place(unit, pieces)

    def _try_acquire_place(self, unit: HZPUnit) -> Place | None:
        """A place for a piece of `unit`, as soon as reductions that are under way have left one."""
        nbytes = unit.reduction_nbytes(self._pieces[unit][0])
        while True:
            place = self.arena.acquire(
                nbytes, nbytes // FP32_NBYTES, torch.float32, from_top=self._is_odd[unit]
            )
            if place is not None or not self._reductions:
                return place
            self._await_oldest_reduction()

    def _memory_for(self, unit: HZPUnit, piece: GradPiece, place: Place) -> list[torch.Tensor]:
        """The piece in `place`, and what reducing it takes."""

        def split(memory: torch.Tensor) -> list[torch.Tensor]:
            groups = unit.groups
            full, shards = split_for_reduction(
                memory, piece.numel, groups.grad_reduce, groups.grad_dtype
            )
            return [full, *shards]

        return place.views_for(f"{piece.numel} by {unit.size_key}", split)

    def _pack(self, unit: HZPUnit, number: int, grads: _Grads, place: Place) -> None:
        """Write a piece of the unit's gradients to `place`."""
        unit.pack_grads(self._pieces[unit][number], grads, self._places(unit, number, place))

    def _places(self, unit: HZPUnit, number: int, place: Place) -> list[torch.Tensor]:
        """HZPUnit.places_of that piece, in `place`."""
        piece = self._pieces[unit][number]
        full = self._memory_for(unit, piece, place)[0]
        key = f"{number} of {len(self._pieces[unit])} by {unit.views_key}"
        return place.views_for(key, lambda _: unit.places_of(piece, full))

    def _reduce_steps(self, unit: HZPUnit, grads: _Grads, place: Place) -> Steps:
        for number, piece in enumerate(self._pieces[unit]):
            if number:
                self._pack(unit, number, grads, place)
            full, *shards = self._memory_for(unit, piece, place)
            yield from unit.reduce_steps(piece, full, shards)

    def _await_oldest_reduction(self) -> None:
        # A stream that computes reuses the memory of the gradients only after this wait.
        reduction = self._reductions.popleft()
        reduction.task.wait()
        reduction.grads.clear()
        self.arena.release(reduction.place)

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
        """A step begins, or begins again: of the last one nothing is in flight or collected."""
        self._finish_reductions()
        self._collected.clear()
        for provided in self._provided.values():
            if provided.place is not None:
                self.arena.release(provided.place)
        self._provided.clear()
        self._await_syncs()
        self._syncs.clear()
        self._last_reduction.clear()
