# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the gradients in flight: the collected ones, and their reductions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from megatron_asynchzp.engine.comm.arena import Arena, Place
from megatron_asynchzp.engine.comm.collectives import Steps, finished, split_for_reduction
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.sharding.decisions import GradsInFlight
from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.engine.sharding.layout import GradPiece
from megatron_asynchzp.engine.sharding.residency import Residency
from megatron_asynchzp.engine.zero.early_update import EarlySends
from megatron_asynchzp.engine.zero.taken_grads import (
    has_grads,
    pack_grads,
    places_of,
    point_at_places,
    take_grads,
    write_grads,
    zero_rest,
)
from megatron_asynchzp.engine.zero.unit import HZPUnit

_Grads = dict[int, torch.Tensor]
"""Gradients of a unit in this micro-batch, by index of the parameter."""


@dataclass
class _Collected:
    # Autograd's own gradients; or, if layers write gradients ([Note: fused gradients]), the place
    # for all of them, its views (each parameter, then the gaps), and the written indices.
    grads: _Grads = field(default_factory=_Grads)
    place: Place | None = None
    places: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    written: set[int] = field(default_factory=set[int])
    # Whether they are complete for a micro-batch and wait for a later one.
    is_kept: bool = False


class _Piece(NamedTuple):
    grads: GradPiece
    memory_key: str  # equal for pieces that split a place in the same way; caches its hash
    places_key: str  # equal if also the parameters lie at the same offsets
    nbytes: int  # memory for the reduction
    shard: torch.Tensor  # accumulates the results

    @classmethod
    def all_of(cls, unit: HZPUnit, pieces: Sequence[GradPiece]) -> "list[_Piece]":
        return [
            cls(
                piece,
                f"{piece.numel} by {unit.size_key}",
                f"{number} of {len(pieces)} by {unit.views_key}",
                unit.reduction_nbytes(piece),
                unit.main_grad.storage[slice(*piece.part)],
            )
            for number, piece in enumerate(pieces)
        ]


class _Reduction(NamedTuple):
    task: Task
    grads: _Grads  # not read yet


class Reductions(GradsInFlight[HZPUnit, _Reduction]):
    """Collects the gradients of units and reduces them.

        main        | B u2 | B u1 | ...
        reduce             | u2 | u1 |                                     gradients in flight
        grad-sync               | u2 | u1 |                                last micro-batch

    [Note: pieces] Autograd's gradients stay as they are until the unit is complete. Then the main
    thread casts and packs their first piece into a place of the arena. The lane reduces it, packs
    the next piece into the same place, and so on. A unit of several pieces keeps its gradients
    until its last piece, so the next such unit waits for it. Most units are a single piece.

        main        | B u1     | pack u1.0 | B u0 ...
        reduce                             | u1.0 | pack u1.1 | u1.1 | pack u1.2 | u1.2 |
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        nbytes: int,
        pieces: dict[HZPUnit, list[GradPiece]],
        driver: Driver,
        scale: float,
        early_sends: EarlySends,
        residency: Residency[HZPUnit] | None = None,
    ):
        device, groups = units[0].device, [a.group for u in units for a in u.groups.grad_reduce]
        new_registered = driver.registered.allocator(groups)
        self.arena = Arena(nbytes, device, driver.device.record_event, new_registered)
        super().__init__(self.arena, residency)
        self._driver, self._scale, self._early_sends = driver, scale, early_sends
        self._pieces = {unit: _Piece.all_of(unit, cut) for unit, cut in pieces.items()}
        self._collected: dict[HZPUnit, _Collected] = {}
        self._last_reduction: dict[HZPUnit, Task] = {}
        self._syncs: dict[HZPUnit, Task] = {}
        # Units that a backward has reached in this step.
        self.reached: set[HZPUnit] = set()

    # ---- one micro-batch

    def take(self, unit: HZPUnit, indices: Iterable[int]) -> None:
        """Collect the gradients of the parameters `indices`; later ones are added in fp32."""
        self.reached.add(unit)
        if unit.reduces_in_place:
            self.reopen(unit)
            write_grads(unit, indices, unit.whole_grads)
            return
        collected = self._collect(unit)
        collected.is_kept = collected.is_kept and not has_grads(unit)
        if collected.place is None:
            take_grads(unit, indices, collected.grads)
        else:
            write_grads(unit, indices, collected.places, collected.written)

    def provide(self, unit: HZPUnit) -> None:
        """Give the layers of `unit`, whose backward begins, the places of their gradients."""
        if unit.reduces_in_place:
            self.reopen(unit)
            point_at_places(unit, unit.whole_grads)
            return
        collected = self._collect(unit)
        if collected.place is None:
            collected.place = self._acquire_place(unit)
            collected.places = self._places_in(unit, self._pieces[unit][0], collected.place)
            for index, grad in collected.grads.items():
                collected.places[index].copy_(grad)
            collected.written.update(collected.grads)
            collected.grads.clear()
        places = collected.places[: len(unit.params)]
        if not unit.overwrites_main_grads:
            zero_rest(places, collected.written)
            collected.written.update(range(len(places)))
        point_at_places(unit, places)

    def _collect(self, unit: HZPUnit) -> _Collected:
        collected = self._collected.get(unit)
        if collected is None:
            collected = self._collected[unit] = _Collected()
        return collected

    def has_pending(self, unit: HZPUnit) -> bool:
        """Return whether this micro-batch has gradients whose reduction has not started."""
        collected = self._collected.get(unit)
        return (collected is not None and not collected.is_kept) or has_grads(unit)

    def is_kept(self, unit: HZPUnit) -> bool:
        """Return whether earlier micro-batches have gradients whose reduction has not started."""
        return unit in self._collected and self._collected[unit].is_kept

    def keep(self, unit: HZPUnit, is_last: bool) -> bool:
        """Return whether complete gradients of `unit` wait for those of a later micro-batch."""
        if unit.reduces_in_place or not self.should_wait(unit, is_last):
            return False
        self.take(unit, range(len(unit.params)))
        self._collected[unit].is_kept = True
        return True

    def start_reduction(self, unit: HZPUnit) -> None:
        """Reduce the gradients of `unit` over the G axes; the lane adds them to main_grad."""
        self.reached.add(unit)
        self.reopen(unit)
        if unit.reduces_in_place:
            self.take(unit, range(len(unit.params)))
            return
        place, grads = self._collect_rest(unit)
        task = self._driver.submit(
            Task(
                "reduce",
                unit.name,
                unit.groups.grad_reduce,
                partial(self._reduce_steps, unit, grads, place),
                ready=(self._driver.device.record_event(),),
            )
        )
        self.note_started(_Reduction(task, grads), place.extent, has_more=bool(grads))
        self._last_reduction[unit] = task

    def reopen(self, unit: HZPUnit) -> None:
        """Wait for the sum over the sharding group, if it has begun, to add gradients."""
        if (sync := self._syncs.pop(unit, None)) is not None:
            sync.wait()
            self._early_sends.await_send(unit)
            unit.reopen_grads(self._scale)

    def _collect_rest(self, unit: HZPUnit) -> tuple[Place, _Grads]:
        """Return the place with the first piece, and the gradients that later pieces read."""
        indices, pieces = range(len(unit.params)), self._pieces[unit]
        if unit not in self._collected and len(pieces) == 1:  # the usual case, and the fastest
            place, written = self._acquire_place(unit), set[int]()
            places = self._places_in(unit, pieces[0], place)
            write_grads(unit, indices, places, written)
            zero_rest(places, written)
            return place, {}
        self.take(unit, indices)
        collected = self._collected.pop(unit)
        if (place := collected.place) is not None:
            zero_rest(collected.places, collected.written)
            return place, {}
        place = self._acquire_place(unit)
        self._pack(unit, pieces[0], collected.grads, place)
        return place, {} if len(pieces) == 1 else collected.grads

    def _acquire_place(self, unit: HZPUnit) -> Place:
        pieces = self._pieces[unit]
        nbytes = pieces[0].nbytes
        extent = self.hold_extent(nbytes, len(pieces))
        return self.arena.place_at(extent, nbytes, nbytes // FP32_NBYTES, torch.float32)

    def _memory_for(self, unit: HZPUnit, piece: _Piece, place: Place) -> list[torch.Tensor]:
        """Return the piece in `place`, and the memory that reducing it takes."""

        def split(memory: torch.Tensor) -> list[torch.Tensor]:
            groups = unit.groups
            full, shards = split_for_reduction(
                memory, piece.grads.numel, groups.grad_reduce, groups.grad_dtype
            )
            return [full, *shards]

        return place.views_for(piece.memory_key, split)

    def _places_in(self, unit: HZPUnit, piece: _Piece, place: Place) -> list[torch.Tensor]:
        """Return views of `place`: `piece`'s part of each parameter, and then the gaps."""
        full = self._memory_for(unit, piece, place)[0]
        return place.views_for(piece.places_key, lambda _: places_of(unit, piece.grads, full))

    def _pack(self, unit: HZPUnit, piece: _Piece, grads: _Grads, place: Place) -> None:
        pack_grads(piece.grads, grads, self._places_in(unit, piece, place))

    def _reduce_steps(self, unit: HZPUnit, grads: _Grads, place: Place) -> Steps:
        last = None
        for number, piece in enumerate(self._pieces[unit]):
            if number:
                yield from finished(last)
                self._pack(unit, piece, grads, place)
            full, *shards = self._memory_for(unit, piece, place)
            last = yield from unit.reduce_steps(full, shards, piece.shard)
        return last

    def await_reduction(self, reduction: _Reduction) -> None:
        # After this wait the computing stream may reuse the memory of the gradients.
        reduction.task.wait()
        reduction.grads.clear()

    # ---- the last micro-batch

    def is_syncing(self, unit: HZPUnit) -> bool:
        return unit in self._syncs

    def start_sync(self, unit: HZPUnit) -> Task:
        self._syncs[unit] = self._driver.submit(
            Task(
                "grad-sync",
                unit.name,
                (*unit.groups.grad_sync, *unit.groups.replica_sync),
                lambda: unit.sync_grad_steps(self._scale),
                ready=(self._driver.device.record_event(),),
                after=(self._last_reduction.get(unit),),
            )
        )
        return self._syncs[unit]

    # ---- the step

    def _await_syncs(self) -> None:
        for sync in self._syncs.values():
            sync.wait()

    def finish(self) -> None:
        self.await_all()
        self._await_syncs()

    def forget_events(self) -> None:
        """Forget what ended on one side of a capture, where the other side cannot wait for it."""
        self.arena.forget_users()
        self._syncs.clear()
        self._last_reduction.clear()

    def begin_step(self) -> None:
        """Begin a step, or repeat it: await reductions, and forget collected gradients."""
        self.await_all()
        for collected in self._collected.values():
            if collected.place is not None:
                self.arena.release(collected.place.extent)
        self._collected.clear()
        self.reached.clear()
        if self._residency is not None:
            self._residency.restart()
        self._await_syncs()
        self._syncs.clear()
        self._last_reduction.clear()
