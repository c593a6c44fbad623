# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the parameters in flight: the order in which a step uses its units, which unit is gathered
ahead of its use into which place, and which parameter shards are rebuilt after the optimizer.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.arena import Arena, Place
from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.in_flight import aligned, needed_together, seen_from_top
from megatron_asynchzp.sharding.residency import Residency
from megatron_asynchzp.zero.unit import HZPUnit, Phase

_logger = logging.getLogger("megatron_asynchzp")


class UseOrder:
    """The sequence of uses of one step, forward and backward of all micro-batches.

    Every step is recorded and is what the next one is expected to do. A step that departs from it
    (a module skipped, an early exit) is followed no further: `upcoming` is empty until `restart`.
    """

    def __init__(self) -> None:
        self._expected: list[HZPUnit] = []
        self._used: list[HZPUnit] = []
        self._is_followed = True

    def restart(self) -> None:
        """A step begins; the one before it, if it used anything, is the record from now on."""
        if self._used:
            self._expected, self._used = self._used, []
        self._is_followed = True

    def visit(self, unit: HZPUnit) -> HZPUnit | None:
        """`unit` is used now. Returns the unit that was expected, at the first departure only."""
        position = len(self._used)
        self._used.append(unit)
        if not self._is_followed or position >= len(self._expected):
            return None
        expected = self._expected[position]
        self._is_followed = expected is unit
        return None if self._is_followed else expected

    def upcoming(self, most: int) -> Sequence[HZPUnit]:
        """The next uses, as far as they are known, at most that many."""
        position = len(self._used)
        return self._expected[position : position + most] if self._is_followed else ()


class KeptParams:
    """Parameters that stay gathered from one use to a later one: the decision, and the memory that
    all model chunks of a rank share for it.

    budget: bytes beside those that the chunks need without it; takes_rest: whether the budget is to
    be enlarged by what the device has left, see `take_rest`; chunks: who uses it.
    """

    def __init__(
        self,
        budget: int,
        device: torch.device,
        record_event: Callable[[], Any],
        takes_rest: bool = False,
    ):
        self.residency = Residency[HZPUnit](budget, lambda unit: unit.gathered_nbytes)
        self.arena = Arena(aligned(budget), device, record_event)
        self.takes_rest = takes_rest
        self._device = device
        self.chunks: list[Gathers] = []

    def take_rest(self, left_nbytes: int) -> None:
        """Enlarge the budget by the least of what the ranks have left, so that all keep the same.

        left_nbytes: on this rank. Once, between two steps. Collective over all ranks.
        """
        self.takes_rest = False
        least = torch.tensor(left_nbytes, dtype=torch.int64, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)  # pyright: ignore[reportUnknownMemberType]
        if nbytes := aligned(int(least)):
            self.arena.grow(nbytes)
            self.residency.enlarge(nbytes)


class Gathers:
    """Gathers units ahead of their use, and rebuilds their shards after the optimizer.

        gather      | u0 | u1 |      | u2 | ...                            parameters in flight
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        param-sync  | u0 | u1 | u2 |                                       after the optimizer

    A unit is spare while it is gathered and not in use: its gather was started ahead of the use,
    or it was kept from one use to the next. The place of a spare unit can be taken from it.

    nbytes: of memory for gathered parameters; warned: topics of the warnings that were logged, each
    once; viewed: units of which a view was found when their memory was to be reused. _used: units
    of this training step in the order of their first use, those included that are never gathered.
    Nothing that is iterated is a set: its order would differ between ranks.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        config: ScheduleConfig,
        nbytes: int,
        driver: Driver,
        stays: KeptParams | None = None,
    ):
        self._units, self._driver, self._device = units, driver, driver.device
        self._depth = config.depth
        self._training_order, self._evaluation_order = UseOrder(), UseOrder()
        self._order = self._training_order
        self._used: dict[HZPUnit, None] = {}
        self.warned: set[str] = set()
        self.viewed: set[HZPUnit] = set()
        at_top = seen_from_top([unit.gathered_nbytes for unit in units])
        self._is_at_top = dict(zip(units, at_top, strict=True))
        needs = [unit.in_flight(config.grad_slot_nbytes) for unit in units]
        self._needed_with = {
            units[index]: [units[other] for other in others]
            for index, others in needed_together(needs).items()
        }
        self._places: dict[HZPUnit, Place] = {}
        self._apart: set[str] = set()  # sizes of units that do not use the arena's memory
        self._gathers: dict[HZPUnit, Task] = {}  # of units that are not in use yet
        self._kept: dict[HZPUnit, None] = {}
        self._syncs: dict[HZPUnit, Task] = {}
        self._updates: dict[HZPUnit, Task] = {}
        self._synced_early: set[HZPUnit] = set()
        self._room_in_backward = 0.0
        self._shards_written: dict[str, Any] = {}
        self.note_written()
        self._stays = stays
        if stays is None:
            self.arena = Arena(nbytes, units[0].device, self._device.record_event)
        else:
            stays.arena.grow(nbytes)
            stays.chunks.append(self)
            self.arena = stays.arena

    # ---- use

    def use(self, unit: HZPUnit) -> None:
        """Make the full parameters of `unit` readable on the current stream."""
        if self._order is self._training_order:
            self._used.setdefault(unit)
        if unit.is_always_unsharded:
            if (sync := self._syncs.pop(unit, None)) is not None:
                sync.wait()
            return
        if unit.phase is Phase.UNSHARDED and unit not in self._kept:
            return
        self._visit(unit)
        if unit in self._kept:
            del self._kept[unit]
        else:
            if unit not in self._gathers:
                self._start_gather(unit, self._take_place(unit))
            self._gathers.pop(unit).wait()
            self._syncs.pop(unit, None)  # the gather came after it
            place = self._places[unit]
            unit.point_at(place.storage, place.views_for(unit.views_key, unit.views_of))
        self._prefetch()

    def _visit(self, unit: HZPUnit) -> None:
        if self._stays is not None and self._order is self._training_order:
            self._stays.residency.visit(unit)
        if (expected := self._order.visit(unit)) is not None:
            self._warn_once(
                "departure",
                f"step {self._driver.step} uses {unit.name} where the step before used "
                f"{expected.name}: what follows in a step that departs from the one before is "
                "gathered on demand",
            )

    def release(self, unit: HZPUnit) -> None:
        """The computation with `unit` has been issued; its memory may be used again."""
        if unit.is_always_unsharded or unit.phase is not Phase.UNSHARDED or unit in self._kept:
            return
        if self._is_next(unit) or self._is_to_stay(unit):
            self._kept.setdefault(unit)  # the turn from forward to backward, or a later use
            return
        self._drop(unit)
        self._prefetch()

    def _is_to_stay(self, unit: HZPUnit) -> bool:
        """Whether there is memory for `unit` until its next use in this step."""
        is_training = self._order is self._training_order
        return is_training and self._stays is not None and self._stays.residency.keeps(unit)

    def _is_next(self, unit: HZPUnit) -> bool:
        """Whether `unit` is used again, soon, before anything that is not gathered yet."""
        for following in self._upcoming():
            if following is unit:
                return True
            if following.phase is Phase.SHARDED and following not in self._gathers:
                return False
        return False

    def _upcoming(self) -> Sequence[HZPUnit]:
        # Far enough for memory that holds a part of the model, which is what it is for.
        return self._order.upcoming(len(self._units))

    def release_all(self) -> None:
        """Drop every unit in use, or kept: nothing is computed with them any more."""
        for unit in self._units:
            if not unit.is_always_unsharded and unit.phase is Phase.UNSHARDED:
                self._drop(unit)

    def _drop(self, unit: HZPUnit) -> None:
        self._kept.pop(unit, None)
        unit.reshard()
        place = self._places[unit]
        # On a device a collective's handle is dropped where it is waited for, by this thread.
        if place.is_viewed(patiently=not (self._device.runs_ahead or place.is_apart)):
            self.viewed.add(unit)
            # [Note: views that outlive the unit] Saved-tensor hooks see what autograd saves, not
            # what a module keeps elsewhere (an attribute of ctx, a cache). Reusing the memory
            # under such a view would silently give wrong numbers (law 5). From now on units like
            # this one are gathered into memory of their own, which is freed with its last view.
            self._warn_once(
                "views",
                f"{unit.name} keeps views of its parameters outside autograd: their "
                f"{place.storage.nbytes / 2**20:.1f} MiB stay in memory for as long as it does",
            )
            if not place.is_apart:
                self._apart.add(unit.size_key)
                self.arena.leave(place)
        self._release_place(unit)

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self.warned:
            self.warned.add(topic)
            if self._units[0].groups.topology.rank == 0:
                _logger.warning("%s (logged once)", text)

    # ---- gathers

    def _acquire_place(self, unit: HZPUnit, leaves_room: bool = True) -> Place | None:
        """A place that is free, None without one; leaves_room: [Note: room for the layer]."""
        if leaves_room and not self._leaves_room(unit):
            return None
        return self.arena.acquire(
            unit.size_key,
            unit.layout.padded_numel,
            unit.dtype,
            from_top=self._is_at_top[unit],
            is_apart=unit.size_key in self._apart,
        )

    def _leaves_room(self, unit: HZPUnit) -> bool:
        """[Note: room for the layer] Several units of a layer are in use at the same time. What was
        placed between others ahead of its use may lie in the middle of the memory when they are
        gone, with too little on both sides of it for the other units of its layer."""
        others = self._needed_with.get(unit, ())
        if not (missing := [other for other in others if other not in self._places]):
            return True
        held = [self._places[other] for other in others if other in self._places]
        more = [(other.gathered_nbytes, self._is_at_top[other]) for other in missing]
        return self.arena.leaves_room(unit.gathered_nbytes, self._is_at_top[unit], held, more)

    def _take_place(self, unit: HZPUnit) -> Place:
        """A place for a unit that is needed now: free, taken from spare units, or in new memory."""
        spares = self._spares()
        while (place := self._acquire_place(unit, leaves_room=bool(spares))) is None:
            if spares:
                chunk, spare = spares.pop()
                chunk._drop_spare(spare)
                continue
            nbytes = unit.gathered_nbytes
            self._warn_once(
                "growth",
                f"{unit.name} is used with more units at a time than there is memory in flight "
                f"for: {nbytes / 2**20:.1f} MiB are added to it",
            )
            self.arena.grow(nbytes)
        return place

    def _release_place(self, unit: HZPUnit) -> None:
        self.arena.release(self._places.pop(unit), self._device.record_event())

    def _drop_spare(self, unit: HZPUnit) -> None:
        if unit in self._kept:
            self._drop(unit)
            return
        self._gathers.pop(unit).wait()
        self._release_place(unit)

    def _spares(self) -> list[tuple["Gathers", HZPUnit]]:
        """What may lose its place to a unit that is needed now, the last one first; with its
        chunk, where chunks share their memory."""
        others = [] if self._stays is None else [c for c in self._stays.chunks if c is not self]
        all_kept = [(chunk, unit) for chunk in (*others, self) for unit in chunk._kept]
        return [
            *((chunk, unit) for chunk, unit in all_kept if chunk._is_to_stay(unit)),
            *((chunk, unit) for chunk in others for unit in chunk._gathers),
            *((chunk, unit) for chunk, unit in all_kept if not chunk._is_to_stay(unit)),
            *((self, unit) for unit in self._gathers),
        ]

    def drop_spares(self) -> None:
        """Return when nothing is gathered that is not in use."""
        for unit in [*self._gathers, *self._kept]:
            self._drop_spare(unit)

    def _start_gather(self, unit: HZPUnit, place: Place) -> None:
        self._places[unit] = place
        self._gathers[unit] = self._driver.submit(
            Task(
                "gather",
                unit.name,
                unit.groups.unshard,
                lambda: unit.gather_steps(place.storage),
                # The last write, and the last readers.
                ready=(self._shards_written.pop("gather", None), *place.ready),
                after=(self._syncs.get(unit), self._updates.get(unit)),
            )
        )

    def _prefetch(self, among: Collection[HZPUnit] | None = None) -> None:
        """Gather what is used next, in that order, as far as it fits and the depth allows it, which
        is counted for each size of unit: a small one does not hold up a layer.

        among: whose shards can be read, or will be by what was submitted; None for all.
        """
        for unit in self._upcoming():
            if unit.phase is Phase.UNSHARDED or unit in self._gathers:
                continue
            if (among is not None and unit not in among) or not self._try_gather_ahead(unit):
                return

    def _try_gather_ahead(self, unit: HZPUnit) -> bool:
        """Gather `unit` if the depth and the memory allow it. Returns whether."""
        if [ahead.size_key for ahead in self._gathers].count(unit.size_key) >= self._depth:
            return False
        place = self._acquire_place(unit)
        if place is not None:
            self._start_gather(unit, place)
        return place is not None

    # ---- shards

    def readers_of_shard(self, unit: HZPUnit) -> tuple[Task | None, ...]:
        """What an update of `unit` within backward must not overtake."""
        return self._gathers.get(unit), self._syncs.get(unit)

    def note_update(self, unit: HZPUnit, update: Task) -> None:
        """`update` writes main_param of `unit` within backward; what reads the shard waits."""
        self._updates[unit] = update
        if self._takes_room_in_backward(unit):
            self._synced_early.add(unit)
            self._start_sync(unit)

    def _takes_room_in_backward(self, unit: HZPUnit) -> bool:
        """Whether the shard of `unit`, just updated in backward, is to be rebuilt there as well.

        Backward takes two thirds of the computation, and sees all gradients on the links outside a
        parameter shard; forward a third, and all param-syncs. So where both take as long as the
        computation, backward has room for two thirds of the sum less the gradients: a third of
        param-sync in fp32, nothing in bf16, whose gradients are twice as long. Spread over
        backward: what is left then comes as evenly through the next forward as its computation.
        """
        params, grads = _outer_traffic(unit)
        self._room_in_backward += 2 * params - grads
        if 3 * params > self._room_in_backward:
            return False
        self._room_in_backward -= 3 * params
        return True

    def start_syncs(self) -> None:
        """Rebuild the shards in the order in which this step first used them, so that the next
        forward can start while later units are on their way, and gather the first units again."""
        self.drop_spares()
        self._restart_order(self._training_order)
        self.note_written()
        synced = {unit for unit in self._units if not unit.is_trained} | self._synced_early
        for unit in dict.fromkeys([*self._used, *self._units]):
            if unit not in synced:
                self._start_sync(unit)
                synced.add(unit)
            self._prefetch(synced)
        self._synced_early.clear()

    def _start_sync(self, unit: HZPUnit) -> None:
        self._syncs[unit] = self._driver.submit(
            Task(
                "param-sync",
                unit.name,
                unit.groups.param_sync,
                unit.sync_param_steps,
                ready=(self._shards_written.pop("param-sync", None),),
                after=(self._updates.get(unit),),
            )
        )

    def join_syncs(self) -> None:
        """Return when every parameter shard is up to date."""
        if not self._syncs:
            return
        for sync in self._syncs.values():
            sync.wait()
        self._syncs.clear()
        # From here on a gather cannot wait for the tasks themselves any more.
        self.note_written()

    def note_written(self) -> None:
        """Parameter shards were written on the current stream: gathers come after that."""
        # What comes later in the lane of one that has waited for it comes after it, too.
        self._shards_written = dict.fromkeys(("gather", "param-sync"), self._device.record_event())

    # ---- steps

    def begin_evaluation(self) -> None:
        """A forward without backward begins."""
        self._driver.timeline.pause()
        self._driver.shorten_record()
        self._restart_order(self._evaluation_order)

    def begin_step(self) -> None:
        """A step begins, or begins again: what updated the shards in the last one has ended."""
        self._updates.clear()
        self._used.clear()
        self._synced_early.clear()
        self._room_in_backward = 0.0
        self._restart_order(self._training_order)
        self._prefetch()

    def _restart_order(self, order: UseOrder) -> None:
        self._order = order
        order.restart()
        if self._stays is not None and order is self._training_order:
            self._stays.residency.restart()


def _outer_traffic(unit: HZPUnit) -> tuple[float, float]:
    """Bytes that this rank sends in a step outside its parameter shard: parameters, gradients."""
    topology, numel = unit.groups.topology, unit.layout.padded_numel
    param, optim = numel / topology.sizes.param, numel / topology.sizes.optim
    replicas = topology.world_size / topology.sizes.optim
    grads = param - optim + 2 * optim * (1 - 1 / replicas)
    grads *= unit.groups.grad_dtype.itemsize
    return unit.dtype.itemsize * (param - optim), grads
