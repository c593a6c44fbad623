# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the decisions of a step: what is gathered, kept, dropped and waited for next, and where in
memory. The engine carries them out, the planner writes them down: both derive from the classes
here. Knows no tensors, streams or tasks.

[Note: decisions] Every decision follows from the order of calls alone, never from timing. So it is
the same on every rank of a sharding group, and so is the order of collectives (law 3). Nothing that
is iterated is a set: its order would differ between ranks.
"""

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharding.in_flight import UnitInFlight, needed_together, seen_from_top
from megatron_asynchzp.sharding.memory_map import Extent, MemoryMap
from megatron_asynchzp.sharding.residency import Residency
from megatron_asynchzp.sharding.seats import seats_nbytes, seats_of
from megatron_asynchzp.sharding.uses import Uses


class Stage(enum.Enum):
    """Where a unit that is gathered, or being gathered, is in its life.

        (sharded) -> AHEAD -> IN_USE -> (sharded)
                                | ^
                                v |
                               KEPT

    While it is not in use a unit is spare: another one that is needed now may take its place.
    """

    AHEAD = "ahead"
    """Its gather was started, by `prefetch` or by the use that needs it; nothing has used it."""
    IN_USE = "in use"
    """From `use_unit` until `release`: a module computes with it."""
    KEPT = "kept"
    """Released, and used again soon, or there is memory for it until its next use."""


@dataclass
class _Gathered[Held]:
    """A unit that is not sharded. held: what start_gather returned."""

    extent: Extent
    held: Held
    stage: Stage = Stage.AHEAD


class ParamsInFlight[Unit: Hashable, User, Held](ABC):
    """Which units of a model chunk are gathered, and where: see Stage.

    needs: of each unit, in the order of the chunk.
    sizes: of each unit, equal for those that fit the same place.
    depth: units of each size gathered ahead.
    memory: for gathered parameters.
    chunks: of the rank that share `memory`, to which this one is added.
    residency: decides what stays gathered for a later micro-batch, None for nothing.

    seats: of the units that have one.
    sends_early: whether units may be sent before the update: until a shard that was is needed.
    """

    def __init__(
        self,
        needs: Mapping[Unit, UnitInFlight],
        sizes: Mapping[Unit, Hashable],
        depth: int,
        memory: MemoryMap[User],
        chunks: "list[ParamsInFlight[Unit, User, Held]]",
        residency: Residency[Unit] | None = None,
    ):
        self._needs, self._sizes, self._depth = needs, sizes, depth
        self._memory, self._chunks, self._residency = memory, chunks, residency
        chunks.append(self)
        self._training_uses, self._evaluation_uses = Uses[Unit](), Uses[Unit]()
        self._uses = self._training_uses
        units, in_flight = list(needs), list(needs.values())
        at_top = seen_from_top([need.params for need in in_flight])
        self._is_at_top = dict(zip(units, at_top, strict=True))
        self.seats = self._reserve_seats()
        self._needed_with = {
            units[index]: [units[other] for other in others]
            for index, others in needed_together(in_flight).items()
        }
        self._gathered: dict[Unit, _Gathered[Held]] = {}  # in the order of their last `_enter`
        self._to_rebuild: dict[Unit, None] = {}  # shards, in the order of their use
        self._rebuilt_ahead: dict[Unit, None] = {}  # or being rebuilt, and not used yet
        self._sent: dict[Unit, None] = {}  # before the update that makes them
        self.sends_early = True

    def _reserve_seats(self) -> dict[Unit, Extent]:
        seated = {unit: need for unit, need in self._needs.items() if need.is_seated}
        seats = seats_of([(need.layer, need.params) for need in seated.values()], self._depth)
        if not (nbytes := seats_nbytes(seats)):
            return {}
        first, _ = self._memory.reserve(nbytes)
        shifted = [(first + start, first + stop) for start, stop in seats]
        return dict(zip(seated, shifted, strict=True))

    # ---- what carries the decisions out

    @abstractmethod
    def start_gather(self, unit: Unit, extent: Extent) -> Held:
        """Begin to gather `unit` into `extent`. Returns what the other three are given."""

    @abstractmethod
    def begin_use(self, unit: Unit, held: Held) -> None:
        """Wait for the gather of `unit`, and compute with what it brought."""

    @abstractmethod
    def end_use(self, unit: Unit, held: Held) -> User | None:
        """Nothing computes with `unit` any more. Returns the last user of its memory."""

    @abstractmethod
    def abandon_gather(self, unit: Unit, held: Held) -> User | None:
        """Wait for the gather of `unit`, whose place is needed. Returns as end_use."""

    @abstractmethod
    def start_sync(self, unit: Unit) -> None:
        """Begin to rebuild the parameter shard of `unit`."""

    @abstractmethod
    def start_preview(self, unit: Unit) -> None:
        """Begin to send what the update is going to make of `unit` into its parameter shards."""

    def note_growth(self, unit: Unit) -> None:  # noqa: B027 (the planner has no log)
        """There was no memory for `unit`: more is taken."""

    def note_late(self) -> None:  # noqa: B027 (the planner has no log)
        """In this run nothing is sent early any more."""

    @property
    def is_training(self) -> bool:
        """Whether a training step runs, not an evaluation."""
        return self._uses is self._training_uses

    # ---- where units are

    def _stage_of(self, unit: Unit) -> Stage | None:
        """None where it is sharded."""
        one = self._gathered.get(unit)
        return None if one is None else one.stage

    def _enter(self, unit: Unit, stage: Stage) -> _Gathered[Held]:
        one = self._gathered[unit] = self._gathered.pop(unit)
        one.stage = stage
        return one

    def _all_in(self, *stages: Stage) -> list[Unit]:
        """List the units in one of `stages`; those that entered theirs last come last."""
        return [unit for unit, one in self._gathered.items() if one.stage in stages]

    # ---- use

    def use_unit(self, unit: Unit) -> Unit | None:
        """`unit` is needed now. Returns who was expected, at the first departure of a step."""
        if (stage := self._stage_of(unit)) is Stage.IN_USE:
            return None
        if self._residency is not None and self.is_training:
            self._residency.visit(unit)
        expected = self._uses.visit(unit)
        if stage is Stage.KEPT:
            self._enter(unit, Stage.IN_USE)
        else:
            if stage is None:
                self._start(unit, self._take_extent(unit))
            self.begin_use(unit, self._enter(unit, Stage.IN_USE).held)
        self.note_shard_used(unit)
        self.prefetch()
        return expected

    def release(self, unit: Unit) -> None:
        """The computation with `unit` has been issued; its memory may be used again."""
        if self._stage_of(unit) is not Stage.IN_USE:
            return
        if self._is_next(unit) or self._should_keep(unit):
            self._enter(unit, Stage.KEPT)  # the turn from forward to backward, or a later use
            return
        self._drop(unit)
        self.prefetch()

    def release_all(self) -> None:
        """Drop every unit in use, or kept: nothing is computed with them any more."""
        for unit in self._all_in(Stage.IN_USE, Stage.KEPT):
            self._drop(unit)

    def drop_spares(self) -> None:
        """Return when nothing is gathered that is not in use."""
        for unit in [*self._all_in(Stage.AHEAD), *self._all_in(Stage.KEPT)]:
            self._drop_spare(unit)

    def expect(self, unit: Unit) -> None:
        """`unit` was used next in the step before, which was not run."""
        self._training_uses.visit(unit)
        if self._residency is not None:
            self._residency.visit(unit)

    def restart(self, is_training: bool = True) -> None:
        """A step begins, or an evaluation."""
        self._uses = self._training_uses if is_training else self._evaluation_uses
        self._uses.restart()
        if self._residency is not None and is_training:
            self._residency.restart()

    # ---- shards

    def rebuild(self, units: Iterable[Unit]) -> None:
        """After the optimizer: rebuild the shards of `units`, in the order of their use, so that
        the next forward can start while later units are on their way; and gather the first ones.

        [Note: shards ahead] A shard is rebuilt some units ahead of its use: of each size as many as
        are gathered ahead, the one that is rebuilt, and one for whose computation it has time.
        Were all submitted at once, whatever waits for the device would wait for all of them: a
        host that synchronises, or the next collective where launches have one order.
        """
        self._to_rebuild = dict.fromkeys(units)
        self._rebuilt_ahead.clear()
        self._rebuild_ahead()
        self.prefetch()

    def send_early(self, unit: Unit) -> None:
        """Send `unit`, whose gradient is complete, before the update. Until that has come its
        shards hold what belongs to the next step."""
        if unit not in self._sent:
            self._sent[unit] = None
            self.start_preview(unit)

    def use_shard(self, unit: Unit) -> None:
        """The shard of `unit` is needed as it is before the update: all that was sent early is
        rebuilt."""
        if unit in self._sent:
            if self.is_training:
                self.send_nothing_early()
            self.take_back()

    def send_nothing_early(self) -> None:
        """From now on: shards are needed as they were after their gradients are complete."""
        if self.sends_early:
            self.sends_early = False
            self.note_late()

    def take_back(self) -> None:
        """The update of what was sent early does not come, or not now."""
        sent, self._sent = self._sent, {}
        for unit in sent:
            self.start_sync(unit)

    def rebuild_rest(self) -> None:
        """Begin with all shards that are yet to be rebuilt."""
        for unit in list(self._to_rebuild):
            self.rebuild_now(unit)

    def rebuild_now(self, unit: Unit) -> None:
        """Begin to rebuild the shard of `unit`, if that is yet to be done: it is needed."""
        if unit in self._to_rebuild:
            del self._to_rebuild[unit]
            self._rebuilt_ahead[unit] = None
            self.start_sync(unit)

    def note_shard_used(self, unit: Unit) -> None:
        """`unit` computes: others can be rebuilt ahead."""
        self._rebuilt_ahead.pop(unit, None)
        self._rebuild_ahead()

    def _rebuild_ahead(self) -> None:
        for unit in list(self._to_rebuild):
            size = self._sizes[unit]
            num_ahead = sum(self._sizes[other] == size for other in self._rebuilt_ahead)
            if self._depth and num_ahead >= self._depth + 2:
                return
            self.rebuild_now(unit)
            self.prefetch()

    def _should_keep(self, unit: Unit) -> bool:
        """Whether there is memory for `unit` until its next use in this step."""
        residency = self._residency
        return self.is_training and residency is not None and residency.keeps(unit)

    def _is_next(self, unit: Unit) -> bool:
        """Whether `unit` is used again, soon, before anything that is not gathered yet."""
        for following in self._upcoming():
            if following == unit:
                return True
            if following not in self._gathered:
                return False
        return False

    def _upcoming(self) -> Sequence[Unit]:
        # Far enough for memory that holds a part of the model, which is what it is for.
        return self._uses.upcoming(len(self._needs))

    # ---- gathers

    def _start(self, unit: Unit, extent: Extent) -> None:
        self.use_shard(unit)
        self.rebuild_now(unit)
        self._gathered[unit] = _Gathered(extent, self.start_gather(unit, extent))

    def prefetch(self) -> None:
        """Gather what is used next, in that order, as far as it fits and the depth allows it, which
        is counted for each size of unit: a small one does not hold up a layer. A unit whose shard
        is yet to be rebuilt, or was sent early, has to wait."""
        for unit in self._upcoming():
            if unit in self._gathered:
                continue
            if unit in self._to_rebuild or unit in self._sent or not self._try_gather_ahead(unit):
                return

    def _try_gather_ahead(self, unit: Unit) -> bool:
        """Gather `unit` if the depth and the memory allow it. Returns whether."""
        ahead = [self._sizes[other] for other in self._all_in(Stage.AHEAD)]
        if ahead.count(self._sizes[unit]) >= self._depth:
            return False
        extent = self._find_span(unit)
        if extent is not None:
            self._start(unit, extent)
        return extent is not None

    # ---- memory

    def _find_span(self, unit: Unit, leaves_room: bool = True) -> Extent | None:
        """A place that is free, None without one; leaves_room: [Note: room for the layer]."""
        if (seat := self.seats.get(unit)) is not None:
            return seat if self._holder_of(seat) is None else None
        if leaves_room and not self._leaves_room(unit):
            return None
        return self._memory.take(self._needs[unit].params, self._is_at_top[unit])

    def _holder_of(self, seat: Extent) -> Unit | None:
        return next((unit for unit, one in self._gathered.items() if one.extent == seat), None)

    def _leaves_room(self, unit: Unit) -> bool:
        """[Note: room for the layer] Several units of a layer are in use at the same time. What was
        placed between others ahead of its use may lie in the middle of the memory when they are
        gone, with too little on both sides of it for the other units of its layer."""
        others = self._needed_with.get(unit, ())
        if not (missing := [other for other in others if other not in self._gathered]):
            return True
        held = [self._gathered[other].extent for other in others if other in self._gathered]
        more = [(self._needs[other].params, self._is_at_top[other]) for other in missing]
        nbytes = self._needs[unit].params
        return self._memory.leaves_room(nbytes, self._is_at_top[unit], held, more)

    def _take_extent(self, unit: Unit) -> Extent:
        """A place for a unit that is needed now: free, taken from spare units, or in new memory."""
        if unit in self.seats:
            return self._take_seat(unit)
        spares = [(chunk, spare) for chunk, spare in self._spares() if spare not in chunk.seats]
        while (extent := self._find_span(unit, leaves_room=bool(spares))) is None:
            if spares:
                chunk, spare = spares.pop()
                chunk._drop_spare(spare)
                continue
            self.note_growth(unit)
            self._memory.grow(self._needs[unit].params)
        return extent

    def _take_seat(self, unit: Unit) -> Extent:
        seat = self.seats[unit]
        if (holder := self._holder_of(seat)) is not None:
            if self._stage_of(holder) is Stage.IN_USE:
                raise ConfigurationError(
                    f"{unit} is used while {holder} is: beside CUDA graphs both have one place; "
                    "drop --cuda-graph-impl"
                )
            self._drop_spare(holder)
        return seat

    def _spares(self) -> "list[tuple[ParamsInFlight[Unit, User, Held], Unit]]":
        """List the units, each with its chunk, that may lose their place to a unit that is needed
        now. The last of the list goes first."""
        others = [chunk for chunk in self._chunks if chunk is not self]
        all_kept = [
            (chunk, unit) for chunk in (*others, self) for unit in chunk._all_in(Stage.KEPT)
        ]
        return [
            *((chunk, unit) for chunk, unit in all_kept if chunk._should_keep(unit)),
            *((chunk, unit) for chunk in others for unit in chunk._all_in(Stage.AHEAD)),
            *((chunk, unit) for chunk, unit in all_kept if not chunk._should_keep(unit)),
            *((self, unit) for unit in self._all_in(Stage.AHEAD)),
        ]

    def _drop(self, unit: Unit) -> None:
        one = self._gathered.pop(unit)
        self._give_back(unit, one.extent, self.end_use(unit, one.held))

    def _drop_spare(self, unit: Unit) -> None:
        if self._stage_of(unit) is Stage.KEPT:
            self._drop(unit)
            return
        one = self._gathered.pop(unit)
        self._give_back(unit, one.extent, self.abandon_gather(unit, one.held))

    def _give_back(self, unit: Unit, extent: Extent, last_user: User | None) -> None:
        if unit not in self.seats:
            self._memory.give_back(extent, last_user)
        elif last_user is not None:
            self._memory.note_user(extent, last_user)


class _UnderWay[Reduction](NamedTuple):
    reduction: Reduction
    extent: Extent
    has_more: bool


class GradsInFlight[Unit: Hashable, Reduction](ABC):
    """Where the gradients of units lie while they are reduced, and which of them stay unreduced.

    memory: for gradients that are reduced.
    residency: decides whose gradients of several micro-batches are added up before they are
        reduced, None for none.
    """

    def __init__(self, memory: MemoryMap[object], residency: Residency[Unit] | None = None):
        self._memory, self._residency = memory, residency
        self._under_way: deque[_UnderWay[Reduction]] = deque()

    @abstractmethod
    def await_reduction(self, reduction: Reduction) -> None:
        """Return when `reduction` has ended: its memory is needed."""

    def should_wait(self, unit: Unit, is_last: bool) -> bool:
        """Whether the gradients of `unit`, complete for this micro-batch, wait for those of a later
        one. is_last: there is none."""
        if self._residency is None:
            return False
        self._residency.visit(unit)
        return not is_last and self._residency.keeps(unit)

    def take_extent(self, nbytes: int, num_pieces: int) -> Extent:
        """Memory for the first piece of a unit's gradients. A unit of several pieces keeps its
        gradients until its last one; so it waits for another such unit."""
        while num_pieces > 1 and any(one.has_more for one in self._under_way):
            self.await_oldest()
        while (extent := self._memory.take(nbytes)) is None:
            if self._under_way:
                self.await_oldest()
            else:
                # All memory is being filled: one unit collects fused gradients to the end of
                # backward, say the norm behind the layers, and another begins.
                self._memory.grow(nbytes)
        return extent

    def note_started(self, reduction: Reduction, extent: Extent, has_more: bool) -> None:
        """`reduction` is under way in `extent`; has_more: gradients of its unit wait beside it."""
        self._under_way.append(_UnderWay(reduction, extent, has_more))

    def await_oldest(self) -> None:
        """Return when the reduction that was started first has ended."""
        oldest = self._under_way.popleft()
        self.await_reduction(oldest.reduction)
        self._memory.give_back(oldest.extent)

    def await_all(self) -> None:
        """Return when every reduction that was started has ended."""
        while self._under_way:
            self.await_oldest()
