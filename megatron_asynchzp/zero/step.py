# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a step asks for, and in which order: parameters, gradients, and the comparison of what
the ranks issued. Must not know hooks, autograd or slots.
"""

from collections.abc import Callable, Sequence

from megatron_asynchzp.comm.driver import Driver, Job
from megatron_asynchzp.comm.order_check import OrderCheck, OrderMismatch
from megatron_asynchzp.comm.task import Steps, Task
from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.gathers import ParamsInFlight
from megatron_asynchzp.zero.reductions import GradsInFlight, Update
from megatron_asynchzp.zero.unit import HZPUnit
from megatron_asynchzp.zero.unit_tasks import UnitTasks


class UnitScheduler:
    """Gathers units ahead of their use and takes their gradients away.

        gather      | u0 | u1 |      | u2 | ...                            params
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        reduce                                       | u2 | u1 |           grads
        grad-sync   (last micro-batch)                    | u2 | u1 |      grads
        param-sync  | u0 | u1 | u2 |                                       params

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
        self.update: Update | None = None
        self.is_last_micro_batch = False
        self._tasks = UnitTasks(driver)
        self.params = ParamsInFlight(self.units, config, self._tasks)
        self.grads = GradsInFlight(self.units, config, self._tasks, grad_scale)
        self._order_check: OrderCheck | None = None

    @property
    def step(self) -> int:
        """How many have begun."""
        return self._tasks.step

    def ring_nbytes(self) -> dict[str, int]:
        """Bytes of the slots of both kinds, with what the reductions need beside theirs."""
        return {"param_ring": self.params.rings.nbytes, "grad_ring": self.grads.rings.nbytes}

    def num_slots_in_use(self) -> int:
        """Slots that hold parameters or gradients now."""
        return self.params.rings.num_in_use + self.grads.rings.num_in_use

    # ---- one micro-batch

    def begin_evaluation(self) -> None:
        """A forward without backward begins."""
        self.params.begin_evaluation()

    def use(self, unit: HZPUnit) -> None:
        """Make the full parameters of `unit` readable on the current stream."""
        self.params.use(unit)

    def release(self, unit: HZPUnit) -> None:
        """The computation with `unit` has been issued; its slot may be used again."""
        self.params.release(unit)

    def take_grad(self, unit: HZPUnit, index: int) -> None:
        """Take the gradient of parameter `index`, which is complete for this call of its module."""
        self.grads.take(unit, index)

    def has_pending_grads(self, unit: HZPUnit) -> bool:
        """Whether gradients of this micro-batch were accumulated and not sent away."""
        return self.grads.has_pending(unit)

    def reduce(self, unit: HZPUnit) -> None:
        """Send the gradients of `unit` away; they are added to main_grad when they arrive."""
        if not unit.is_trained:
            return
        self._await_order_check()
        self.grads.start_reduction(unit)
        if self.is_last_micro_batch:
            self._start_grad_sync(unit)

    def _start_grad_sync(self, unit: HZPUnit) -> None:
        if self.update is None:
            self.grads.start_sync(unit)
        else:
            readers = self.params.readers_of_shard(unit)
            self.params.note_update(unit, self.grads.start_sync(unit, self.update, readers))

    # ---- one step

    def sync_grads(self) -> None:
        """Return when every O shard holds the whole sum. Starts what backward did not start."""
        self._await_order_check()
        for unit in self.units:
            if unit.is_trained and not self.grads.is_syncing(unit):
                self._start_grad_sync(unit)
        if self.update is not None:
            self.params.start_syncs()
        self.grads.finish()
        if self.update is None:
            # The optimizer writes next what the syncs of the last step read, where this step did
            # not use a unit, and what guesses read, where it had fewer micro-batches.
            self.params.forget_guesses()
            self.params.join_syncs()

    def sync_params(self) -> None:
        """Rebuild the parameter shards from the optimizer's, and gather the first units again.

        Returns at once. Where units are updated in backward, `sync_grads` has done it.
        """
        if self.update is None:
            self.params.start_syncs()

    def settle(self) -> None:
        """Return when nothing is in flight and every parameter shard is up to date.

        For whoever wants to use the units or their communicators beside this scheduler.
        """
        self.params.forget_guesses()
        self.grads.finish()
        self.params.join_syncs()
        self._finish_order_check()

    def restart(self) -> None:
        """A step begins, or begins again: nothing of the last one is in flight any more."""
        self.driver.raise_failure()
        self.params.release_all()
        self.grads.begin_step()
        self.is_last_micro_batch = False
        self._tasks.step += 1
        self.driver.begin_step(self.step)
        self.params.begin_step()

    # ---- the order of the ranks

    def check_order(self) -> None:
        """Compare what the ranks of each sharding group issued since the last call.

        Collective. Raises OrderMismatch on every rank of a group in which one differs, and
        CollectiveFailure where the ranks do not even meet here. Where units are updated in
        backward the gradients are used already, and the next call raises: the comparison would
        queue behind the parameters of the next step.
        """
        if not self.config.checks_order:
            self.driver.log.forget()
            return
        self._finish_order_check()
        all_groups = dict.fromkeys(unit.groups for unit in self.units)
        axes = [axis.group for groups in all_groups for axis in groups.all_reduce_axes]
        ranks = [groups.ranks_along(groups.all_reduce_axes) for groups in all_groups]
        all_ranks = tuple(sorted(set().union(*ranks)))

        def submit(start: Callable[[], Steps]) -> Job:
            # Other runtimes of this rank may still use the same communicators.
            after = tuple(self.driver.unfinished_jobs("reduce", "grad-sync"))
            ready = (self._tasks.device.record_event(),)
            task = Task("order", "all units", all_ranks, self.step, start, ready, after)
            return self.driver.submit(task)

        log, device = self.driver.log, self.units[0].device
        self._order_check = log.start_check(axes, device, self.step, submit)
        if self.update is None:
            self._finish_order_check()

    def _await_order_check(self) -> None:
        # Where its answer is waited for later only: it has the communicators of the gradients, on
        # which one rank must not reduce what another one still compares. On a CPU each lane issues
        # by itself, so no order of submission sees to that.
        if self._order_check is not None:
            self._order_check.wait()

    def _finish_order_check(self) -> None:
        check, self._order_check = self._order_check, None
        try:
            if check is not None:
                check.finish()
        except OrderMismatch as mismatch:
            self.driver.fail(mismatch)  # this step's gradients are of no use
            raise
