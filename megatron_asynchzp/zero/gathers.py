# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the parameters in flight: which unit is gathered ahead into which slot, which shards are
rebuilt, and who waits for what. Must not know hooks or gradients.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch

from megatron_asynchzp.comm.driver import Job
from megatron_asynchzp.comm.order_check import UseOrder
from megatron_asynchzp.comm.ring import Slot
from megatron_asynchzp.device import Device
from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.unit import HZPUnit, Phase
from megatron_asynchzp.zero.unit_rings import UnitRings
from megatron_asynchzp.zero.unit_tasks import UnitTasks

_logger = logging.getLogger("megatron_asynchzp")


class ParamsInFlight:
    """Gathers units ahead of their use, and rebuilds their shards after the optimizer.

        gather      | u0 | u1 |      | u2 | ...                            parameter ring
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        param-sync  | u0 | u1 | u2 |                                       after the optimizer

    A gather that nobody has used yet, and a unit kept gathered at the turn from forward to
    backward, are guesses: their slots can be taken from them.

    told: what was said once already, by topic. _used: units of this training step in the order of
    their first use, those included that are never gathered. Nothing that is iterated is a set: its
    order would differ between ranks.
    """

    def __init__(self, units: Sequence[HZPUnit], config: ScheduleConfig, tasks: UnitTasks):
        self._units, self._tasks = units, tasks
        self._depth = config.depth
        self._device = tasks.device
        self._training_order, self._evaluation_order = UseOrder(), UseOrder()
        self._order = self._training_order
        self._used: dict[HZPUnit, None] = {}
        self.told: set[str] = set()
        self._slots: dict[HZPUnit, Slot] = {}
        self._gathers: dict[HZPUnit, Job] = {}
        self._kept: dict[HZPUnit, None] = {}
        self._syncs: dict[HZPUnit, Job] = {}
        self._updates: dict[HZPUnit, Job] = {}
        self._synced_early: set[HZPUnit] = set()
        self._room_in_backward = 0.0
        self._shards_written = self._device.record_event()
        self.rings = UnitRings(
            units,
            lambda unit: not unit.is_always_unsharded,
            config.param_slots or config.depth + 1,
            partial(_new_slot, device=self._device),
        )

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
            self._kept.pop(unit, None)
        else:
            if unit not in self._gathers:
                self._start_gather(unit, self._acquire_slot(unit))
            self._gathers.pop(unit).wait()
            self._syncs.pop(unit, None)  # the gather came after it
            unit.point_at(self._slots[unit].storage)
        self._prefetch()

    def _visit(self, unit: HZPUnit) -> None:
        if (expected := self._order.visit(unit)) is not None:
            step = self._tasks.step
            self._tell_once(
                "departure",
                f"step {step} uses {unit.name} where the step before used {expected.name}: "
                "what follows in a step that departs from the one before is gathered on demand",
            )

    def release(self, unit: HZPUnit) -> None:
        """The computation with `unit` has been issued; its slot may be used again."""
        if unit.is_always_unsharded or unit.phase is not Phase.UNSHARDED or unit in self._kept:
            return
        if self._is_next(unit):
            self._kept.setdefault(unit)  # the turn from forward to backward
        else:
            self._drop(unit)
        self._prefetch()

    def _is_next(self, unit: HZPUnit) -> bool:
        """Whether `unit` is used again, soon, before anything that is not gathered yet."""
        for following in self._upcoming():
            if following is unit:
                return True
            if not self._is_gathered(following):
                return False
        return False

    def _is_gathered(self, unit: HZPUnit) -> bool:
        return unit in self._gathers or unit.phase is Phase.UNSHARDED

    def _upcoming(self) -> Iterator[HZPUnit]:
        # Far enough for rings that hold a part of the model, which is what they are for.
        return self._order.upcoming(len(self._units))

    def release_all(self) -> None:
        """Whatever was computed with is not used again."""
        for unit in self._units:
            if not unit.is_always_unsharded and unit.phase is Phase.UNSHARDED:
                self._drop(unit)

    def _drop(self, unit: HZPUnit) -> None:
        self._kept.pop(unit, None)
        unit.reshard()
        slot = self._slots[unit]
        if slot.is_viewed():
            # [Note: views that outlive the unit] Saved-tensor hooks see what autograd saves, not
            # what a module keeps elsewhere (an attribute of ctx, a cache). Reusing the memory
            # under such a view would give wrong numbers without a word (law 5).
            self._tell_once(
                "views",
                f"{unit.name} keeps views of its parameters outside autograd: their "
                f"{slot.storage.nbytes / 2**20:.1f} MiB stay in memory for as long as it does",
            )
            slot.leave_storage()
        self._release_slot(unit)

    def _tell_once(self, topic: str, text: str) -> None:
        if topic not in self.told:
            self.told.add(topic)
            if self._units[0].groups.topology.rank == 0:
                _logger.warning("%s (said once)", text)

    # ---- gathers

    def _acquire_slot(self, unit: HZPUnit) -> Slot:
        """A slot for a unit that is needed now: free, taken from a guess, or a new one."""
        ring = self.rings.ring_of(unit)
        if (slot := ring.acquire()) is not None:
            return slot
        for guess in [*self._gathers, *self._kept]:
            if self.rings.ring_of(guess) is ring:
                self._forget_guess(guess)
                return ring.acquire()
        return ring.grow()

    def _release_slot(self, unit: HZPUnit) -> None:
        ring = self.rings.ring_of(unit)
        ring.release(self._slots.pop(unit), self._device.record_event())

    def _forget_guess(self, unit: HZPUnit) -> None:
        if unit in self._kept:
            self._drop(unit)
            return
        self._gathers.pop(unit).wait()
        self._release_slot(unit)

    def forget_guesses(self) -> None:
        """Return when nothing is gathered that is not used now."""
        for unit in [*self._gathers, *self._kept]:
            self._forget_guess(unit)

    def _start_gather(self, unit: HZPUnit, slot: Slot) -> None:
        self._slots[unit] = slot
        self._gathers[unit] = self._tasks.submit(
            "gather",
            unit,
            unit.groups.unshard,
            lambda: unit.gather_steps(slot.storage),
            after=[self._syncs.get(unit), self._updates.get(unit)],
            ready=(self._shards_written, slot.free_event),  # the last write, the last reader
        )

    def _prefetch(self, among: Collection[HZPUnit] | None = None) -> None:
        """Gather what is used next, in that order, as far as slots are free and the depth allows
        it, which is counted for each size of unit: a small one does not hold up a layer.

        among: whose shards can be read, or will be by what was submitted; None for all.
        """
        for unit in self._upcoming():
            if self._is_gathered(unit):
                continue
            if (among is not None and unit not in among) or not self._start_guess(unit):
                return

    def _start_guess(self, unit: HZPUnit) -> bool:
        """Gather `unit` if a slot is free for it. Returns whether one was."""
        ring = self.rings.ring_of(unit)
        if sum(self.rings.ring_of(guess) is ring for guess in self._gathers) >= self._depth:
            return False
        slot = ring.acquire()
        if slot is not None:
            self._start_gather(unit, slot)
        return slot is not None

    # ---- shards

    def readers_of_shard(self, unit: HZPUnit) -> list[Job | None]:
        """What an update of `unit` within backward must not overtake."""
        return [self._gathers.get(unit), self._syncs.get(unit)]

    def note_update(self, unit: HZPUnit, job: Job) -> None:
        """`job` updates main_param of `unit` within backward: what reads the shard comes after."""
        self._updates[unit] = job
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
        self.forget_guesses()
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
        self._syncs[unit] = self._tasks.submit(
            "param-sync",
            unit,
            unit.groups.param_sync,
            unit.sync_param_steps,
            after=[self._updates.get(unit)],
            ready=(self._shards_written,),
        )

    def join_syncs(self) -> None:
        """Return when every parameter shard is up to date."""
        if not self._syncs:
            return
        for job in self._syncs.values():
            job.wait()
        self._syncs.clear()
        # From here on a gather cannot wait for the jobs themselves any more.
        self.note_written()

    def note_written(self) -> None:
        """Parameter shards were written on the current stream: gathers come after that."""
        self._shards_written = self._device.record_event()

    # ---- steps

    def begin_evaluation(self) -> None:
        """A forward without backward begins."""
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


def _new_slot(unit: HZPUnit, device: Device) -> Slot:
    slot = Slot(torch.zeros(unit.layout.padded_numel, dtype=unit.dtype, device=unit.device))
    # The zeros, and what used this memory before, are written on the current stream; the first
    # gather into it is not.
    slot.free_event = device.record_event()
    return slot


def _outer_traffic(unit: HZPUnit) -> tuple[float, float]:
    """Bytes that this rank sends in a step outside its parameter shard: parameters, gradients."""
    topology, numel = unit.groups.topology, unit.layout.padded_numel
    param, optim = numel / topology.sizes.param, numel / topology.sizes.optim
    replicas = topology.world_size / topology.sizes.optim
    grads = 4 * (param - optim + 2 * optim * (1 - 1 / replicas))
    return unit.dtype.itemsize * (param - optim), grads
