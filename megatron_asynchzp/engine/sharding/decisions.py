# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Decides what a step gathers, keeps, drops and waits for next, and where in memory.

The engine executes the decisions and the planner lists them: both subclass these classes, which
know no tensors, streams or tasks.

[Note: decisions] Decisions follow from the order of calls alone, never from timing, so all ranks of
a sharding group issue their collectives in one order (law 3). No set is iterated: its order differs
between ranks.
"""

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.engine.sharding.early_units import EarlyUnits
from megatron_asynchzp.engine.sharding.in_flight import (
    UnitInFlight,
    placed_from_top,
    units_gathered_together,
)
from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap
from megatron_asynchzp.engine.sharding.residency import Residency, Uses
from megatron_asynchzp.engine.sharding.seats import assign_seats, seats_nbytes
from megatron_asynchzp.errors import ConfigurationError


class Stage(enum.Enum):
    """The stage of a unit that is gathered or being gathered.

        (sharded) -> AHEAD -> IN_USE -> (sharded)
                                | ^
                                v |
                               KEPT

    A unit in AHEAD or KEPT is spare: a unit needed now may take its place.
    """

    AHEAD = "ahead"
    """From the start of its gather, by `prefetch` or `unshard`, until its first use."""
    IN_USE = "in use"
    """From `unshard` until `reshard`: a module computes with it."""
    KEPT = "kept"
    """After `reshard`: its next use is near, or memory suffices until then."""


@dataclass
class _GatheredUnit[Handle]:
    extent: Extent
    handle: Handle  # the result of start_unshard
    stage: Stage = Stage.AHEAD


class ParamsInFlight[Unit: Hashable, User, Handle](ABC):
    """Decides which units of a model chunk are gathered, when, and where: see Stage."""

    def __init__(
        self,
        needs: Mapping[Unit, UnitInFlight],  # in the order of the chunk
        sizes: Mapping[Unit, Hashable],  # equal for units that fit the same place
        depth: int,  # units of each size to gather ahead
        memory: MemoryMap[User],
        chunks: "list[ParamsInFlight[Unit, User, Handle]]",  # that share `memory`; gains this one
        residency: Residency[Unit] | None = None,  # keeps units for later micro-batches
        early_units: EarlyUnits[Unit] | None = None,
    ):
        self._needs, self._sizes, self._depth = needs, sizes, depth
        self._memory, self._chunks, self._residency = memory, chunks, residency
        chunks.append(self)
        self._training_uses, self._evaluation_uses = Uses[Unit](), Uses[Unit]()
        self._uses = self._training_uses
        units, in_flight = list(needs), list(needs.values())
        from_top = placed_from_top([need.params for need in in_flight])
        self._from_top = dict(zip(units, from_top, strict=True))
        self.seats = self._reserve_seats()  # fixed places of some units, for CUDA graphs
        self._needed_with = {
            units[index]: [units[neighbour] for neighbour in neighbours]
            for index, neighbours in units_gathered_together(in_flight).items()
        }
        # In the order of the last `_enter`.
        self._gathered: dict[Unit, _GatheredUnit[Handle]] = {}
        self._to_rebuild: dict[Unit, None] = {}  # shards to rebuild, in the order of their use
        self._rebuilt_ahead: dict[Unit, None] = {}  # rebuilt, or being rebuilt, and not used yet
        self._early_units = EarlyUnits[Unit]() if early_units is None else early_units

    def _reserve_seats(self) -> dict[Unit, Extent]:
        seated = {unit: need for unit, need in self._needs.items() if need.is_seated}
        seats = assign_seats([(need.layer, need.params) for need in seated.values()], self._depth)
        if not (nbytes := seats_nbytes(seats)):
            return {}
        first, _ = self._memory.reserve(nbytes)
        shifted = [(first + start, first + stop) for start, stop in seats]
        return dict(zip(seated, shifted, strict=True))

    # ---- actions of the subclass

    @abstractmethod
    def start_unshard(self, unit: Unit, extent: Extent) -> Handle:
        """Start to gather `unit` into `extent`; the result is the other actions' `handle`."""

    @abstractmethod
    def wait_for_unshard(self, unit: Unit, handle: Handle) -> None:
        """Wait for the gather of `unit` and point its parameters at the result."""

    @abstractmethod
    def finish_reshard(self, unit: Unit, handle: Handle) -> User | None:
        """Point the parameters of `unit` at nothing; return the last user of its memory."""

    @abstractmethod
    def cancel_unshard(self, unit: Unit, handle: Handle) -> User | None:
        """Wait for the gather of `unit`, whose memory is needed; return the memory's last user."""

    @abstractmethod
    def start_param_sync(self, unit: Unit) -> None:
        """Start to rebuild the parameter shard of `unit`."""

    @abstractmethod
    def start_early_send(self, unit: Unit) -> None:
        """Start to send the coming update of `unit` to its parameter shards."""

    def note_growth(self, unit: Unit) -> None:  # noqa: B027 (the planner has no log)
        """Report that memory grows because none was free for `unit`."""

    def note_early_sends_stopped(self) -> None:  # noqa: B027 (the planner has no log)
        """Report that this run sends nothing early from now on."""

    @property
    def is_training(self) -> bool:
        return self._uses is self._training_uses

    # ---- stages

    def _stage_of(self, unit: Unit) -> Stage | None:
        gathered = self._gathered.get(unit)
        return None if gathered is None else gathered.stage

    def _enter(self, unit: Unit, stage: Stage) -> _GatheredUnit[Handle]:
        gathered = self._gathered[unit] = self._gathered.pop(unit)
        gathered.stage = stage
        return gathered

    def _all_in(self, *stages: Stage) -> list[Unit]:
        return [unit for unit, gathered in self._gathered.items() if gathered.stage in stages]

    # ---- use

    def unshard(self, unit: Unit) -> Unit | None:
        """Gather `unit` and wait for it.

        Returns:
            At the first use that differs from the previous step: the unit that was used there.
        """
        if (stage := self._stage_of(unit)) is Stage.IN_USE:
            return None
        if self._residency is not None and self.is_training:
            self._residency.visit(unit)
        expected = self._uses.visit(unit)
        if stage is Stage.KEPT:
            self._enter(unit, Stage.IN_USE)
        else:
            if stage is None:
                self._start(unit, self._hold_extent(unit))
            self.wait_for_unshard(unit, self._enter(unit, Stage.IN_USE).handle)
        self.note_shard_used(unit)
        self.prefetch()
        return expected

    def reshard(self, unit: Unit) -> None:
        """Free the memory of `unit`, whose computation is issued, or keep it for a near use."""
        if self._stage_of(unit) is not Stage.IN_USE:
            return
        if self._is_next(unit) or self._should_keep(unit):
            self._enter(unit, Stage.KEPT)  # between forward and backward, or until a later use
            return
        self._drop(unit)
        self.prefetch()

    def reshard_all(self) -> None:
        """Drop every unit in use or kept: no computation needs them."""
        for unit in self._all_in(Stage.IN_USE, Stage.KEPT):
            self._drop(unit)

    def drop_spares(self) -> None:
        for unit in [*self._all_in(Stage.AHEAD), *self._all_in(Stage.KEPT)]:
            self._drop_spare(unit)

    def skip(self, unit: Unit) -> None:
        self._training_uses.visit(unit)
        if self._residency is not None:
            self._residency.visit(unit)

    def restart(self, is_training: bool = True) -> None:
        self._uses = self._training_uses if is_training else self._evaluation_uses
        self._uses.restart()
        if self._residency is not None and is_training:
            self._residency.restart()

    # ---- shards

    def rebuild(self, units: Iterable[Unit]) -> None:
        """Rebuild the shards of `units` after the update, in the order of their use.

        [Note: shards ahead] At most `depth` + 2 shards of each size are rebuilt before their use:
        one for each gather ahead, one in progress, and one that overlaps with computation. If all
        were submitted at once, a host that synchronises would wait for all of them, and so would
        the next collective if launches have one order.
        """
        self._to_rebuild = dict.fromkeys(units)
        self._rebuilt_ahead.clear()
        self._rebuild_ahead()
        self.prefetch()

    def send_early(self, unit: Unit) -> None:
        """Send `unit` before the update; its shards then hold the parameters of the next step."""
        if unit not in self._early_units.units:
            self._early_units.units[unit] = None
            self.start_early_send(unit)

    def restore_shard(self, unit: Unit) -> None:
        """Cancel all early sends if `unit` was sent early, because its old shard is needed."""
        if unit in self._early_units.units:
            if self.is_training:
                self.stop_early_sends()
            self.cancel_early_sends()

    def stop_early_sends(self) -> None:
        if self._early_units.is_allowed:
            self._early_units.is_allowed = False
            self.note_early_sends_stopped()

    def cancel_early_sends(self) -> None:
        """Rebuild the shards that were sent early: their update does not come now."""
        for unit in self._early_units.pop_all():
            self.start_param_sync(unit)

    def rebuild_remaining(self) -> None:
        for unit in list(self._to_rebuild):
            self.rebuild_now(unit)

    def rebuild_now(self, unit: Unit) -> None:
        if unit in self._to_rebuild:
            del self._to_rebuild[unit]
            self._rebuilt_ahead[unit] = None
            self.start_param_sync(unit)

    def note_shard_used(self, unit: Unit) -> None:
        self._rebuilt_ahead.pop(unit, None)
        self._rebuild_ahead()

    def _rebuild_ahead(self) -> None:
        for unit in list(self._to_rebuild):
            size = self._sizes[unit]
            num_ahead = sum(self._sizes[ahead] == size for ahead in self._rebuilt_ahead)
            if self._depth and num_ahead >= self._depth + 2:
                return
            self.rebuild_now(unit)
            self.prefetch()

    def _should_keep(self, unit: Unit) -> bool:
        residency = self._residency
        return self.is_training and residency is not None and residency.keeps(unit)

    def _is_next(self, unit: Unit) -> bool:
        for following in self._upcoming():
            if following == unit:
                return True
            if following not in self._gathered:
                return False
        return False

    def _upcoming(self) -> Sequence[Unit]:
        # Memory in flight holds only a part of the model, so this is far enough.
        return self._uses.upcoming(len(self._needs))

    # ---- gathers

    def _start(self, unit: Unit, extent: Extent) -> None:
        self.restore_shard(unit)
        self.rebuild_now(unit)
        self._gathered[unit] = _GatheredUnit(extent, self.start_unshard(unit, extent))

    def prefetch(self) -> None:
        """Gather the next units, in the order of their use, as memory and depth allow.

        The depth counts for each size, so a small unit does not hold up a layer. A unit whose shard
        is not rebuilt yet, or was sent early, stops the prefetch.
        """
        for unit in self._upcoming():
            if unit in self._gathered:
                continue
            if (
                unit in self._to_rebuild
                or unit in self._early_units.units
                or not self._try_gather_ahead(unit)
            ):
                return

    def _try_gather_ahead(self, unit: Unit) -> bool:
        sizes_ahead = [self._sizes[ahead] for ahead in self._all_in(Stage.AHEAD)]
        if sizes_ahead.count(self._sizes[unit]) >= self._depth:
            return False
        extent = self._free_extent(unit)
        if extent is not None:
            self._start(unit, extent)
        return extent is not None

    # ---- memory

    def _free_extent(self, unit: Unit, leaves_room: bool = True) -> Extent | None:
        """Hold free memory, or return None. leaves_room: see [Note: room for the layer]."""
        if (seat := self.seats.get(unit)) is not None:
            return seat if self._holder_of(seat) is None else None
        if leaves_room and not self._leaves_room(unit):
            return None
        return self._memory.hold(self._needs[unit].params, self._from_top[unit])

    def _holder_of(self, seat: Extent) -> Unit | None:
        units = (unit for unit, gathered in self._gathered.items() if gathered.extent == seat)
        return next(units, None)

    def _leaves_room(self, unit: Unit) -> bool:
        """[Note: room for the layer] Several units of a layer are in use at the same time.

        A unit that is gathered ahead may land in the middle of free memory, with too little room on
        either side for the rest of its layer.
        """
        neighbours = self._needed_with.get(unit, ())
        if not (missing := [unit for unit in neighbours if unit not in self._gathered]):
            return True
        held = [self._gathered[unit].extent for unit in neighbours if unit in self._gathered]
        more = [(self._needs[unit].params, self._from_top[unit]) for unit in missing]
        nbytes = self._needs[unit].params
        return self._memory.leaves_room(nbytes, self._from_top[unit], held, more)

    def _hold_extent(self, unit: Unit) -> Extent:
        """Hold memory now: free memory, that of spare units, or new memory."""
        if unit in self.seats:
            return self._vacate_seat(unit)
        spares = [(chunk, spare) for chunk, spare in self._spares() if spare not in chunk.seats]
        while (extent := self._free_extent(unit, leaves_room=bool(spares))) is None:
            if spares:
                chunk, spare = spares.pop()
                chunk._drop_spare(spare)
                continue
            self.note_growth(unit)
            self._memory.extend(self._needs[unit].params)
        return extent

    def _vacate_seat(self, unit: Unit) -> Extent:
        seat = self.seats[unit]
        if (holder := self._holder_of(seat)) is not None:
            if self._stage_of(holder) is Stage.IN_USE:
                raise ConfigurationError(
                    f"{unit} is used while {holder} is in use, but with CUDA graphs both have the "
                    "same place in memory. Drop --cuda-graph-impl."
                )
            self._drop_spare(holder)
        return seat

    def _spares(self) -> "list[tuple[ParamsInFlight[Unit, User, Handle], Unit]]":
        """List units, with their chunks, that may lose their memory; the last goes first."""
        rest = [chunk for chunk in self._chunks if chunk is not self]
        all_kept = [(chunk, unit) for chunk in (*rest, self) for unit in chunk._all_in(Stage.KEPT)]
        return [
            *((chunk, unit) for chunk, unit in all_kept if chunk._should_keep(unit)),
            *((chunk, unit) for chunk in rest for unit in chunk._all_in(Stage.AHEAD)),
            *((chunk, unit) for chunk, unit in all_kept if not chunk._should_keep(unit)),
            *((self, unit) for unit in self._all_in(Stage.AHEAD)),
        ]

    def _drop(self, unit: Unit) -> None:
        gathered = self._gathered.pop(unit)
        self._release(unit, gathered.extent, self.finish_reshard(unit, gathered.handle))

    def _drop_spare(self, unit: Unit) -> None:
        if self._stage_of(unit) is Stage.KEPT:
            self._drop(unit)
            return
        gathered = self._gathered.pop(unit)
        self._release(unit, gathered.extent, self.cancel_unshard(unit, gathered.handle))

    def _release(self, unit: Unit, extent: Extent, last_user: User | None) -> None:
        if unit not in self.seats:
            self._memory.release(extent, last_user)
        elif last_user is not None:
            self._memory.note_last_user(extent, last_user)


class _UnderWay[Reduction](NamedTuple):
    reduction: Reduction
    extent: Extent
    has_more: bool


class GradsInFlight[Unit: Hashable, Reduction](ABC):
    """Decides where gradients are reduced, and which wait for a later micro-batch."""

    def __init__(self, memory: MemoryMap[object], residency: Residency[Unit] | None = None):
        # residency: decides which units sum several micro-batches before a reduction
        self._memory, self._residency = memory, residency
        self._under_way: deque[_UnderWay[Reduction]] = deque()

    @abstractmethod
    def await_reduction(self, reduction: Reduction) -> None:
        """Wait for the end of `reduction`: its memory is needed."""

    def should_wait(self, unit: Unit, is_last: bool) -> bool:
        """Return whether the complete gradients of `unit` wait for those of a later micro-batch."""
        if self._residency is None:
            return False
        self._residency.visit(unit)
        return not is_last and self._residency.keeps(unit)

    def hold_extent(self, nbytes: int, num_pieces: int) -> Extent:
        """Hold memory for the first piece of a unit's gradients.

        A unit of several pieces keeps its gradients until its last piece, so two such units are
        never reduced at the same time.
        """
        while num_pieces > 1 and any(piece.has_more for piece in self._under_way):
            self.await_oldest()
        while (extent := self._memory.hold(nbytes)) is None:
            if self._under_way:
                self.await_oldest()
            else:
                # Units are filling all memory: for example the norm behind the layers collects
                # fused gradients until the end of backward while another unit begins.
                self._memory.extend(nbytes)
        return extent

    def note_started(self, reduction: Reduction, extent: Extent, has_more: bool) -> None:
        """Record that `reduction` uses `extent`; has_more: its unit has further pieces."""
        self._under_way.append(_UnderWay(reduction, extent, has_more))

    def await_oldest(self) -> None:
        oldest = self._under_way.popleft()
        self.await_reduction(oldest.reduction)
        self._memory.release(oldest.extent)

    def await_all(self) -> None:
        while self._under_way:
            self.await_oldest()
