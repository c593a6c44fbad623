# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what is in flight: which unit is gathered ahead into which slot, which gradients are on the
way, and who waits for what. Must not know hooks or autograd.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_asynchzp.comm.collectives import AxisGroup, new_shards
from megatron_asynchzp.comm.order import OrderCheck, OrderMismatch, UseOrder
from megatron_asynchzp.comm.ring import BufferRing, Slot
from megatron_asynchzp.comm.worker import Driver, Job, Steps, Task
from megatron_asynchzp.device import Device
from megatron_asynchzp.zero.unit import HZPUnit, Phase

SCHEDULES = ("inline", "main-thread", "threaded")
_logger = logging.getLogger("megatron_asynchzp")


@dataclass(frozen=True)
class ScheduleConfig:
    """How collectives are driven.

    kind: one of SCHEDULES; prefetch_depth: units gathered ahead of the one that computes;
    param_slots: full parameters of equal units in memory, 0 for as many as the depth can use;
    grad_slots: full gradients of equal units in flight; time_limit_s: after which a collective
    that has not finished is an error; checks_order: compare the ranks' orders once per step.
    """

    kind: str = "threaded"
    prefetch_depth: int = 1
    param_slots: int = 0
    grad_slots: int = 2
    time_limit_s: float = 600.0
    checks_order: bool = True

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule {self.kind!r} is not one of {', '.join(SCHEDULES)}")
        if self.prefetch_depth < 0 or self.param_slots < 0 or self.grad_slots < 1:
            raise ValueError(
                "prefetch depth and parameter slots must be at least 0, gradient slots at least 1"
            )

    @property
    def depth(self) -> int:
        """Nothing is gathered ahead where nothing runs beside the computation."""
        return 0 if self.kind == "inline" else self.prefetch_depth


class UnitScheduler:
    """Gathers units ahead of their use and takes their gradients away.

        gather      | u0 | u1 |      | u2 | ...                            parameter ring
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        reduce                                       | u2 | u1 |           gradient ring
        grad-sync   (last micro-batch)                    | u2 | u1 |
        param-sync  | u0 | u1 | u2 |                                       after the optimizer

    Every decision (what to gather next, which slot) is taken by the main thread from the program
    order alone, never from timing; so it is the same on every rank.

    units: all units of a runtime, on one device; driver: may be shared with other runtimes of
    this rank, whose tasks then have one order; grad_scale: factor on the summed gradients.

    update: set by whoever wants to update each unit's main_param as soon as its gradient is
    complete; see HZPRuntime.update_in_backward.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        config: ScheduleConfig,
        driver: Driver,
        grad_scale: float = 1.0,
    ):
        self.units = list(units)
        self.config = config
        self.driver = driver
        self.grad_scale = grad_scale
        self.update: Callable[[HZPUnit], None] | None = None
        self.step = 0
        self.is_last_micro_batch = False
        self._device = driver.timeline.device
        self._training_order, self._evaluation_order = UseOrder(), UseOrder()
        self._order = self._training_order
        self.told: set[str] = set()
        self._param_rings: dict[tuple, BufferRing] = {}
        self._grad_rings: dict[tuple, BufferRing] = {}
        self._slots: dict[HZPUnit, Slot] = {}
        self._gathers: dict[HZPUnit, Job] = {}
        self._kept: set[HZPUnit] = set()
        self._grad_slots: dict[HZPUnit, tuple[Slot, set[int]]] = {}
        self._reductions: deque[tuple[HZPUnit, Slot, Job]] = deque()
        self._last_reduction: dict[HZPUnit, Job] = {}
        self._grad_syncs: dict[HZPUnit, Job] = {}
        self._param_syncs: dict[HZPUnit, Job] = {}
        self._synced_early: set[HZPUnit] = set()
        self._order_check: OrderCheck | None = None
        self._shards_written = self._device.record_event()
        self._make_rings()

    def _make_rings(self) -> None:
        """One ring per size: as many slots as can be of use, never more than there are units."""
        for unit in self.units:
            key = _ring_key(unit)
            num_equal = sum(_ring_key(other) == key for other in self.units)
            if not unit.is_always_unsharded and key not in self._param_rings:
                num_slots = min(num_equal, self.config.param_slots or self.config.depth + 1)
                new_slot = partial(_new_param_slot, unit, self._device)
                self._param_rings[key] = BufferRing(num_slots, new_slot)
            if unit.is_trained and not unit.reduces_in_place and key not in self._grad_rings:
                num_slots = min(num_equal, self.config.grad_slots)
                self._grad_rings[key] = BufferRing(num_slots, partial(_new_grad_slot, unit))

    def ring_nbytes(self) -> dict[str, int]:
        """Bytes of the slots of both kinds, with what the reductions need beside theirs."""
        return {
            "param_ring": sum(ring.nbytes for ring in self._param_rings.values()),
            "grad_ring": sum(ring.nbytes for ring in self._grad_rings.values()),
        }

    def num_slots_in_use(self) -> int:
        """Slots that hold parameters or gradients now."""
        rings = (*self._param_rings.values(), *self._grad_rings.values())
        return sum(ring.num_slots - ring.num_free for ring in rings)

    def _submit(
        self,
        lane: str,
        unit: HZPUnit,
        axes: Sequence[AxisGroup],
        start: Callable[[], Steps],
        after: Sequence[Job | None] = (),
        ready: Sequence[object] = (),
    ) -> Job:
        ranks = unit.groups.ranks_along(axes)
        jobs = tuple(job for job in after if job is not None)
        return self.driver.submit(
            Task(lane, unit.name, ranks, self.step, start, tuple(ready), jobs)
        )

    # ---- parameters

    def use(self, unit: HZPUnit) -> None:
        """Make the full parameters of `unit` readable on the current stream."""
        if unit.is_always_unsharded:
            if (sync := self._param_syncs.pop(unit, None)) is not None:
                sync.wait()
            return
        if unit.phase is Phase.UNSHARDED and unit not in self._kept:
            return
        self._visit(unit)
        if unit in self._kept:
            self._kept.discard(unit)
        else:
            if unit not in self._gathers:
                self._start_gather(unit, self._acquire_param_slot(unit))
            self._gathers.pop(unit).wait()
            self._param_syncs.pop(unit, None)  # the gather came after it
            unit.point_at(self._slots[unit].storage)
        self._prefetch()

    def _visit(self, unit: HZPUnit) -> None:
        if (expected := self._order.visit(unit)) is not None:
            self._tell_once(
                "departure",
                f"step {self.step} uses {unit.name} where the step before used {expected.name}: "
                "what follows in a step that departs from the one before is gathered on demand",
            )

    def release(self, unit: HZPUnit) -> None:
        """The computation with `unit` has been issued; its slot may be used again."""
        if unit.is_always_unsharded or unit.phase is not Phase.UNSHARDED or unit in self._kept:
            return
        if self._order.upcoming(1) == [unit]:
            self._kept.add(unit)  # the turn from forward to backward: needed next
            return
        self._drop(unit)
        self._prefetch()

    def _drop(self, unit: HZPUnit) -> None:
        self._kept.discard(unit)
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
        self._release_param_slot(unit)

    def _tell_once(self, topic: str, text: str) -> None:
        if topic not in self.told:
            self.told.add(topic)
            if self.units[0].groups.topology.rank == 0:
                _logger.warning("%s (said once)", text)

    def _release_param_slot(self, unit: HZPUnit) -> None:
        ring = self._param_rings[_ring_key(unit)]
        ring.release(self._slots.pop(unit), self._device.record_event())

    def _acquire_param_slot(self, unit: HZPUnit) -> Slot:
        """A slot for a unit that is needed now: free, taken from a guess, or a new one."""
        ring = self._param_rings[_ring_key(unit)]
        if (slot := ring.acquire()) is not None:
            return slot
        for guess in [*self._gathers, *self._kept]:
            if _ring_key(guess) == _ring_key(unit):
                self._forget_guess(guess)
                return ring.acquire()
        return ring.grow()

    def _forget_guess(self, unit: HZPUnit) -> None:
        if unit in self._kept:
            self._drop(unit)
            return
        self._gathers.pop(unit).wait()
        self._release_param_slot(unit)

    def _forget_guesses(self) -> None:
        for unit in [*self._gathers, *self._kept]:
            self._forget_guess(unit)

    def _start_gather(self, unit: HZPUnit, slot: Slot) -> None:
        self._slots[unit] = slot
        updated_by = self._grad_syncs.get(unit) if self.update is not None else None
        self._gathers[unit] = self._submit(
            "gather",
            unit,
            unit.groups.unshard,
            lambda: unit.gather_steps(slot.storage),
            after=[self._param_syncs.get(unit), updated_by],
            ready=(self._shards_written, slot.free_event),  # the last write, the last reader
        )

    def _prefetch(self) -> None:
        for unit in self._order.upcoming(self.config.depth):
            if unit in self._gathers or unit.phase is Phase.UNSHARDED:
                continue
            slot = self._param_rings[_ring_key(unit)].acquire()
            if slot is None:
                return
            self._start_gather(unit, slot)

    # ---- gradients

    def take_grad(self, unit: HZPUnit, index: int) -> None:
        """Take the gradient of parameter `index`, which is complete for this call of its module."""
        if unit.reduces_in_place:
            unit.take_grad(index, unit.main_grad.storage, adds=True)
            return
        slot, written = self._grad_slot(unit)
        if unit.take_grad(index, slot.storage, adds=index in written):
            written.add(index)

    def _grad_slot(self, unit: HZPUnit) -> tuple[Slot, set[int]]:
        """fp32 memory for this micro-batch's full gradients of `unit`, and which are there."""
        if unit not in self._grad_slots:
            ring = self._grad_rings[_ring_key(unit)]
            slot = ring.acquire()
            while slot is None:
                self._await_oldest_reduction()
                slot = ring.acquire()
            self._grad_slots[unit] = slot, set()
        return self._grad_slots[unit]

    def has_pending_grads(self, unit: HZPUnit) -> bool:
        """Whether gradients of this micro-batch were accumulated and not sent away."""
        return unit in self._grad_slots

    def reduce(self, unit: HZPUnit) -> None:
        """Send the gradients of `unit` away; they are added to main_grad when they arrive."""
        if not unit.is_trained:
            return
        if unit in self._grad_syncs:
            raise RuntimeError(
                f"{unit.name}: a gradient came after the one of the last micro-batch; leave the "
                "no_sync() context only for the last one"
            )
        if not unit.reduces_in_place:
            self._start_reduction(unit)
        if self.is_last_micro_batch:
            self._start_grad_sync(unit)

    def _start_reduction(self, unit: HZPUnit) -> None:
        slot, written = self._grad_slot(unit)
        del self._grad_slots[unit]
        unit.zero_rest(slot.storage, written)
        job = self._submit(
            "reduce", unit, unit.groups.grad_reduce,
            lambda: unit.reduce_steps(slot.storage, slot.scratch),
            ready=(self._device.record_event(),),
        )  # fmt: skip
        self._reductions.append((unit, slot, job))
        self._last_reduction[unit] = job

    def _await_oldest_reduction(self) -> None:
        unit, slot, job = self._reductions.popleft()
        job.wait()
        self._grad_rings[_ring_key(unit)].release(slot)

    def _start_grad_sync(self, unit: HZPUnit) -> None:
        axes = (*unit.groups.grad_sync, *unit.groups.replica_sync)
        self._grad_syncs[unit] = self._submit(
            "grad-sync", unit, axes, partial(self._grad_sync_steps, unit),
            after=[self._last_reduction.get(unit), *self._readers_of_shard(unit)],
            ready=(self._device.record_event(),),
        )  # fmt: skip
        if self.update is not None and unit in self._used_last():
            self._start_param_sync(unit)

    def _readers_of_shard(self, unit: HZPUnit) -> list[Job | None]:
        """What an update of `unit` within backward must not overtake."""
        if self.update is None:
            return []
        return [self._gathers.get(unit), self._param_syncs.get(unit)]

    def _grad_sync_steps(self, unit: HZPUnit) -> Steps:
        yield from unit.sync_grad_steps(self.grad_scale)
        if self.update is not None:
            self.update(unit)

    def _used_last(self) -> list[HZPUnit]:
        """Units whose parameter shards are rebuilt within backward, if they are updated there.

        Forward takes a third of the computation and sees half of the communication between
        gradient and parameter shards (all of param-sync), backward two thirds and the other half
        (grad-sync). So where both take as long as the computation, a third of param-sync has its
        place in backward: that of the units which the next forward needs last.
        """
        trained = [unit for unit in self._training_order.first_uses() if unit.is_trained]
        return trained[len(trained) - len(trained) // 3 :]

    def sync_grads(self) -> None:
        """Return when every O shard holds the whole sum. Starts what was not started in backward.

        Raises OrderMismatch where the ranks did not issue the same collectives in this step.
        """
        for unit in self.units:
            if unit.is_trained and unit not in self._grad_syncs:
                self._start_grad_sync(unit)
        if self.update is not None:
            self._start_next_step()
        self._finish_reductions()
        for job in self._grad_syncs.values():
            job.wait()
        self._last_reduction.clear()
        if self.update is None:
            # The optimizer writes next what the syncs of the last step read, where this step did
            # not use a unit, and what guesses read, where it had fewer micro-batches.
            self._forget_guesses()
            self._join_param_syncs()

    def _finish_reductions(self) -> None:
        while self._reductions:
            self._await_oldest_reduction()

    # ---- steps

    def sync_params(self) -> None:
        """Rebuild the parameter shards from the optimizer's, and gather the first units again.

        Returns at once. Where units are updated in backward, `sync_grads` has done it.
        """
        if self.update is None:
            self._start_next_step()

    def _start_next_step(self) -> None:
        """In the order of first use, so that the next forward can start while later units are on
        their way."""
        self._forget_guesses()
        self._restart_order(self._training_order)
        self._shards_written = self._device.record_event()
        trained = [unit for unit in self.units if unit.is_trained]
        in_order = [unit for unit in self._order.first_uses() if unit.is_trained]
        first = self._order.upcoming(self.config.depth)
        for unit in dict.fromkeys([*in_order, *trained]):
            if unit not in self._synced_early:
                self._start_param_sync(unit)
            if unit in first:
                self._prefetch_one(unit)
        self._synced_early.clear()
        self._prefetch()

    def _start_param_sync(self, unit: HZPUnit) -> None:
        updated_by = () if self.update is None else [self._grad_syncs[unit]]
        if self.update is not None:
            self._synced_early.add(unit)
        self._param_syncs[unit] = self._submit(
            "param-sync", unit, unit.groups.param_sync, unit.sync_param_steps,
            after=updated_by, ready=(self._shards_written,),
        )  # fmt: skip

    def _prefetch_one(self, unit: HZPUnit) -> None:
        if unit not in self._gathers and unit.phase is Phase.SHARDED:
            slot = self._param_rings[_ring_key(unit)].acquire()
            if slot is not None:
                self._start_gather(unit, slot)

    def settle(self) -> None:
        """Return when nothing is in flight and every parameter shard is up to date.

        For whoever wants to use the units or their communicators beside this scheduler.
        """
        self._forget_guesses()
        self._finish_reductions()
        for job in self._grad_syncs.values():
            job.wait()
        self._join_param_syncs()
        self._finish_order_check()

    def _join_param_syncs(self) -> None:
        if not self._param_syncs:
            return
        for job in self._param_syncs.values():
            job.wait()
        self._param_syncs.clear()
        # From here on a gather cannot wait for the jobs themselves any more.
        self._shards_written = self._device.record_event()

    def begin_evaluation(self) -> None:
        """A forward without backward begins."""
        self._restart_order(self._evaluation_order)

    def restart(self) -> None:
        """A step begins, or begins again: nothing of the last one is in flight any more."""
        self.driver.raise_failure()
        for unit in self.units:
            if not unit.is_always_unsharded and unit.phase is Phase.UNSHARDED:
                self._drop(unit)
        self._finish_reductions()
        for unit, (slot, _) in self._grad_slots.items():
            self._grad_rings[_ring_key(unit)].release(slot)
        self._grad_slots.clear()
        for job in self._grad_syncs.values():
            job.wait()
        self._grad_syncs.clear()
        self._last_reduction.clear()
        self.is_last_micro_batch = False
        self.step += 1
        self.driver.timeline.fold()
        self._restart_order(self._training_order)
        self._prefetch()

    def _restart_order(self, order: UseOrder) -> None:
        self._order = order
        order.restart()

    def check_order(self) -> None:
        """Compare what the ranks of each sharding group issued since the last call.

        Collective. Raises OrderMismatch on every rank of a group in which one differs, and
        CollectiveFailure where the ranks do not even meet here. Where units are updated in
        backward the gradients are used already, and the next call raises: the comparison would
        queue behind the parameters of the next step.
        """
        if not self.config.checks_order:
            return
        self._finish_order_check()
        all_groups = dict.fromkeys(unit.groups for unit in self.units)
        axes = [axis.group for groups in all_groups for axis in groups.all_reduce_axes]
        ranks = [groups.ranks_along(groups.all_reduce_axes) for groups in all_groups]
        all_ranks = tuple(sorted(set().union(*ranks)))

        def submit(start: Callable[[], Steps]) -> Job:
            # Other runtimes of this rank may still use the same communicators.
            after = tuple(self.driver.unfinished_jobs("reduce", "grad-sync"))
            ready = (self._device.record_event(),)
            task = Task("order", "all units", all_ranks, self.step, start, ready, after)
            return self.driver.submit(task)

        log, device = self.driver.log, self.units[0].device
        self._order_check = log.start_check(axes, device, self.step, submit)
        if self.update is None:
            self._finish_order_check()

    def _finish_order_check(self) -> None:
        check, self._order_check = self._order_check, None
        try:
            if check is not None:
                check.finish()
        except OrderMismatch as mismatch:
            self.driver.fail(mismatch)  # this step's gradients are of no use
            raise


def _new_param_slot(unit: HZPUnit, device: Device) -> Slot:
    slot = Slot(torch.zeros(unit.layout.padded_numel, dtype=unit.dtype, device=unit.device))
    # The zeros, and what used this memory before, are written on the current stream; the first
    # gather into it is not.
    slot.free_event = device.record_event()
    return slot


def _new_grad_slot(unit: HZPUnit) -> Slot:
    full = torch.zeros(unit.layout.padded_numel, dtype=torch.float32, device=unit.device)
    return Slot(full, new_shards(full, unit.groups.grad_reduce))


def _ring_key(unit: HZPUnit) -> tuple:
    sizes = unit.groups.topology
    return unit.layout.padded_numel, unit.dtype, sizes.world_size, sizes.sizes
