# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the step of one model chunk: what is gathered, reduced, compared and rebuilt, and in which
order. Free of hooks and autograd.
"""

import enum
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch

from megatron_asynchzp.comm.collectives import all_reduce_steps, run_steps
from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.order_check import OrderCheck
from megatron_asynchzp.comm.schedules import start_driver
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.device import device_of
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.in_flight import FP32_NBYTES, MemoryInFlight, memory_in_flight
from megatron_asynchzp.sharding.pieces import grad_pieces
from megatron_asynchzp.sharding.residency import Residency
from megatron_asynchzp.zero.gathers import Gathers, ParamBudget
from megatron_asynchzp.zero.reductions import Reductions
from megatron_asynchzp.zero.sent_check import SentCheck
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass(frozen=True, eq=False)
class KeepBudgets:
    """Budgets of what the model chunks of a rank keep from one micro-batch to a later one. params,
    grads: None where nothing is kept."""

    params: ParamBudget | None = None
    grads: Residency[HZPUnit] | None = None

    @classmethod
    def of(cls, config: ScheduleConfig, driver: Driver, device: torch.device) -> "KeepBudgets":
        """Make the budgets of `config`; allocates the memory of parameters that are kept."""
        params = grads = None
        if config.keep_params_nbytes or config.keeps_params_in_free_memory:
            params = ParamBudget(
                config.keep_params_nbytes,
                device,
                driver.device.record_event,
                config.keeps_params_in_free_memory,
            )
        if config.keep_grads_nbytes:
            # The sum of a unit that has its turn is nowhere else, unlike its parameters.
            grads = Residency[HZPUnit](
                config.keep_grads_nbytes,
                lambda unit: FP32_NBYTES * unit.layout.padded_numel,
                counts_own=True,
            )
        return cls(params, grads)

    def grad_record(self) -> list[str]:
        """Name the units whose gradients the last step completed, in order, for a checkpoint.

        [Note: kept after a resume] What is kept decides how gradients are grouped in sums, hence
        their last bits, and is decided from the order of the step before. A process that goes on
        with a run has no such step of its own: it takes the order from the checkpoint.
        """
        return [] if self.grads is None else [unit.name for unit in self.grads.record]

    def expect_grads(self, names: Sequence[str], units: Iterable[HZPUnit]) -> None:
        """Before a step: go on from the grad_record of a checkpoint. units: all of this rank.

        One of other units (another pipeline) is left alone: then a resume is within rounding.
        """
        by_name = {unit.name: unit for unit in units}
        if self.grads is not None and by_name.keys() >= set(names):
            self.grads.expect([by_name[name] for name in names])


class StepState(enum.Enum):
    """State of a model chunk within or between steps; see StepScheduler.state."""

    IDLE = "idle"
    """No gradient is there: since `zero_grads`."""
    COLLECTING = "collecting"
    """Within a step: a forward has come, or a backward, whose gradients are not complete."""
    COMPLETE = "complete"
    """`sync_grads` has completed the gradients, and none came since: they may be used."""
    STREAMING = "streaming"
    """Between two steps whole parameters are being taken; then as before."""
    ASLEEP = "asleep"
    """Between two steps: states are on the host, and there is no memory in flight."""


class OnHost(Protocol):
    """States that are on the host (HostStates), as far as a step has to know them."""

    def settle(self) -> None: ...
    def free(self) -> None: ...


class StepScheduler:
    """Gathers the units of a model chunk ahead of their use and reduces their gradients.

        gather      | u0 | u1 |      | u2 | ...                            gathers
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        reduce                                       | u2 | u1 |           reductions
        grad-sync   (last micro-batch)                    | u2 | u1 |      reductions
        param-sync  | u0 | u1 | u2 |                                       gathers

    Every decision (what to gather next, which slot) is taken by the main thread from the program
    order alone, never from timing; so it is the same on every rank of a sharding group, and so is
    the order of collectives (law 3).

    units: all units of the chunk, on one device.
    driver: may be shared with the other chunks of this rank, whose tasks then have one order (None:
        one of its own).
    grad_scale: factor on the summed gradients.
    budgets: shared by the other chunks of this rank (None: its own).

    memory: what it has in flight, by formula.
    step: number of the one that began last; num_begun: how many have, a repeated one again.
    is_last_micro_batch: whether the gradients of the one that runs are reduced over the whole
        sharding group, see `no_sync`.
    _gathers_for: of what kind the last gathers were, see `meet`.
    early_sends: what is sent before the update; use_order: of the units in a step.
    host_states: of units whose optimizer states are on the host, None for none.
    settings_of_update: what the optimizer is set to, which has to be the same on all ranks.
    state: see StepState; what may be done when, `between_steps` and `refuse_use` say.
    agrees_on_reached: whether `sync_grads` finds out which units have gradients; reached: these, of
        any rank, since gradients were forgotten.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        config: ScheduleConfig,
        driver: Driver | None = None,
        grad_scale: float = 1.0,
        budgets: "KeepBudgets | None" = None,
    ):
        self.units = list(units)
        self._owns_driver = driver is None
        if driver is None:
            driver = start_driver(config, device_of(self.units[0].model_param.storage))
        self.driver = driver
        self.step = self.num_begun = 0
        self.state = StepState.IDLE
        self.is_last_micro_batch = False
        self._gathers_for = "training"
        self.host_states: OnHost | None = None
        self.settings_of_update: Callable[[], Mapping[str, str]] = dict[str, str]
        self._value_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._before_sleep = self.state
        self.agrees_on_reached, self.reached = False, set[HZPUnit]()
        self.schedule = config
        self.memory = memory_in_flight_of(self.units, config)
        if config.keep_params_nbytes or config.keeps_params_in_free_memory:
            _refuse_keeping(self.units, "--asynchzp-keep-params-gb")
        if config.keep_grads_nbytes:
            _refuse_keeping(self.units, "--asynchzp-keep-grads-gb")
        self.budgets = budgets or KeepBudgets.of(config, driver, self.units[0].device)
        self.gathers = Gathers(self.units, config, self.memory.params, driver, self.budgets.params)
        self.early_sends, self.use_order = self.gathers.early_sends, self.gathers.use_order
        pieces = {
            unit: grad_pieces(unit.layout, unit.groups.topology.sizes.grad, config.grad_slot_nbytes)
            for unit in self.units
            if unit.is_trained and not unit.reduces_in_place
        }
        self.reductions = Reductions(
            self.units,
            self.memory.grads,
            pieces,
            driver,
            grad_scale,
            self.early_sends,
            self.budgets.grads,
        )
        all_groups = list(dict.fromkeys(unit.groups for unit in self.units))
        axes = [axis for groups in all_groups for axis in groups.all_reduce_axes]
        # Where there are experts, all ranks exchange tokens in every layer.
        num_in_step = all_groups[0].num_axes_in_step if len(all_groups) == 1 else len(axes)
        self._groups_may_differ = num_in_step < len(axes)
        self._checks_order = config.checks_order
        self._order_check = OrderCheck(driver, axes, num_in_step, self.units[0].device)
        self.sent_check = SentCheck(
            self.units, driver, axes, self.early_sends, self.gathers.await_sync
        )

    # ---- one micro-batch

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Around all micro-batches of a step but the last.

        When it is left, the next micro-batch is the last one: each unit's gradients are then
        reduced over the whole sharding group while backward goes on. A loop that never enters it
        gets the same numbers; all of that reduction then happens in `sync_grads`.
        """
        self.is_last_micro_batch = False
        yield
        self.is_last_micro_batch = True

    def reduce(self, unit: HZPUnit) -> None:
        """Reduce the gradients of `unit`, which are complete for this micro-batch."""
        self.use_order.had_backward = True
        self.state = StepState.COLLECTING
        if not unit.is_trained:
            return
        # On a CPU each lane issues by itself. A comparison that is still on its way has the
        # communicators of the gradients, on which one rank must not reduce what another compares.
        self._order_check.wait()
        if self.reductions.keep(unit, self.is_last_micro_batch):
            return
        self.reductions.start_reduction(unit)
        if self.is_last_micro_batch:
            self.use_order.note_completed(unit)
            self._complete_grads(unit)

    def _complete_grads(self, unit: HZPUnit) -> None:
        """No later micro-batch changes the gradients of `unit`."""
        self.early_sends.note_grads(unit)
        grads = self.reductions.start_sync(unit)
        if self.early_sends.choose(unit, grads, self.num_begun):  # [Note: early update]
            self.gathers.send_early(unit)

    # ---- one step

    def meet(self, kind: str) -> None:
        """Gathers of another kind than before begin, behind a sum over the ranks that gather
        together: where one evaluates and others train, gathers of different sizes would meet. gloo
        ends the process for that, and NCCL may give anything. So they stand still, and find out."""
        if kind == self._gathers_for:
            return
        groups = self.units[0].groups
        # Of one communicator NCCL wants the same operations.
        if axes := groups.reduce_axes_within(groups.topology.sizes.param):
            # As the comparison of orders; kept until the sum has been waited for.
            value = torch.zeros(4, dtype=torch.int64, device=self.units[0].device)
            start, ready = partial(all_reduce_steps, value, axes), self.driver.device.record_event()
            after = [self.driver.latest.get(lane) for lane in ("reduce", "grad-sync", "order")]
            meeting = Task("gather", f"no unit, before {kind},", axes, start, (ready,), after)
            self.driver.submit(meeting).wait()
        self._gathers_for = kind

    def zero_grads(self, number: int | None = None) -> None:
        """Start a step, or start it again: nothing of the last one is in flight any more.

        number: of the step, by which log and messages call it; None: one more than the last. A
            step that is repeated keeps its own.
        """
        self.refuse_use()
        self.driver.raise_failure()
        self.sent_check.check_unwritten_at_rest(with_content=not self.driver.device.runs_ahead)
        self._order_check.send_answer()
        self.gathers.reshard_all()
        self.reductions.begin_step()
        self.is_last_micro_batch = False
        self.state = StepState.IDLE
        self.use_order.begin_step()
        self.step = self.step + 1 if number is None else number
        self.num_begun += 1
        self.driver.begin_step(self.step)
        self.gathers.begin_step()
        for unit in self.units:
            unit.zero_grads()

    def await_readers(self) -> None:
        """Let main parameters be written next, and gradients. What was sent early reads both, the
        syncs of the last step read the former, where this step did not use a unit, and so do
        gathers that are left of a step with fewer micro-batches, or of an evaluation."""
        self.gathers.drop_spares()
        self.gathers.join_syncs()

    def sync_grads(self) -> None:
        """After the last micro-batch: main_grad fragments become the sum over all ranks x scale.

        Starts what backward did not start, waits for it, and compares what the ranks submitted.
        Collective. Raises OrderMismatch on every rank of a sharding group in which one differs, and
        ConfigurationError where neither this step nor one before it had a backward.
        """
        self.refuse_use()
        self._order_check.wait()
        if self.use_order.had_backward or any(map(self.reductions.has_pending, self.units)):
            self.use_order.record_completed()
        elif self.state is not StepState.COMPLETE:
            self._sync_without_micro_batch()
        for unit in self.units:
            if not unit.is_trained:
                continue
            # Kept for a micro-batch that did not come; or of a backward through no module (that of
            # a gradient's norm).
            if self.reductions.is_kept(unit) or self.reductions.has_pending(unit):
                self.reductions.start_reduction(unit)
            if not self.reductions.is_syncing(unit):
                self.early_sends.note_grads(unit)
                self.reductions.start_sync(unit)
        self.reductions.finish()
        self.await_readers()  # gradients are written next, by clipping
        self.use_order.record_used()
        if self.agrees_on_reached:
            self.reached = self._agree_on_reached()
        self.state = StepState.COMPLETE
        self._check_order()
        self.sent_check.send_answers()

    def _sync_without_micro_batch(self) -> None:
        """Do what crosses the groups where ranks that have a micro-batch do it.

        See [Note: no micro-batch].
        """
        if (order := self.use_order.last_completed) is None:
            if self._groups_may_differ and any(unit.is_trained for unit in self.units):
                raise ConfigurationError(
                    "this rank has had no micro-batch yet: each group of ranks takes at least one "
                    "in the first step of a process; give it an empty one, as model(tokens[:0])"
                )
            return
        self.gathers.rebuild_in_last_order()
        for unit in order:
            self.reductions.reopen(unit)  # where a micro-batch has several backwards
            self._complete_grads(unit)

    def _agree_on_reached(self) -> set[HZPUnit]:
        """The units that a backward of any rank has reached. Where gradients are sharded over all
        ranks a backward is a reduction of all, which the comparison of orders finds equal."""
        mine = self.reductions.reached
        topology = self.units[0].groups.topology
        if topology.sizes.grad == topology.world_size:
            return set(mine)
        own = torch.tensor([unit in mine for unit in self.units], dtype=torch.int32)
        flags = own.to(self.units[0].device)
        self._order_check.reduce_max(flags)
        found = cast("list[int]", flags.tolist())  # pyright: ignore[reportUnknownMemberType]
        return {unit for unit, flag in zip(self.units, found, strict=True) if flag}

    @property
    def are_grads_synced(self) -> bool:
        """Whether no gradient came since `sync_grads`."""
        is_complete = self.state is StepState.COMPLETE
        return is_complete and not any(map(self.reductions.has_pending, self.units))

    def _check_order(self) -> None:
        if not self._checks_order:
            self.driver.submitted.drain()
            return
        self._order_check.start(self.settings_of_update())
        # On a device the host would have to wait. Then the next comparison raises, or `settle`,
        # before a checkpoint is written.
        if not self.driver.device.runs_ahead:
            self._order_check.finish()

    def skip_update(self) -> None:
        """In place of the optimizer and of `sync_params`: this step has no update."""
        self.early_sends.note_outcome(self.num_begun, did_stand=False)
        self.gathers.cancel_early_sends()

    def sync_params(self, skip_unchanged: bool = False) -> None:
        """After the optimizer: rebuild the parameter shards from main_param, in the background, and
        gather the first units again.

        skip_unchanged: what was sent early is compared with what the update made, and is not sent
            again where that is the same ([Note: compared with what was sent]). Collective then.
        """
        self.driver.timeline.end_computation()
        current = self.sent_check.already_current() if skip_unchanged else []
        self.early_sends.note_outcome(self.num_begun, bool(current))
        self.sent_check.note_update(current, self.reached if skip_unchanged else None)
        self.gathers.start_syncs(current)

    # ---- what may be done when

    def between_steps(self, what: str) -> None:
        """The door of `what`, which takes or moves the states as they are between two steps."""
        self.refuse_use()
        if what == "sleep()" and any(unit.is_seated for unit in self.units):
            raise ConfigurationError(
                "sleep() beside CUDA graphs: the states would come back at other addresses than "
                "those that the graphs read"
            )
        if self.is_in_step:
            raise ConfigurationError(f"{what} within a step: call it after step() or zero_grad()")

    @property
    def is_in_step(self) -> bool:
        """Whether a forward came whose gradients are not complete."""
        return self.state is StepState.COLLECTING

    @property
    def is_asleep(self) -> bool:
        """Whether the states are on the host."""
        return self.state is StepState.ASLEEP

    def refuse_use(self) -> None:
        """Before whatever computes with the parameters, or changes them."""
        self.refuse_sleep()
        if self.state is StepState.STREAMING:
            raise ConfigurationError(
                "whole parameters are being taken: take them all, or close() the iterator, first"
            )

    @contextmanager
    def streaming(self) -> Generator[Sequence[HZPUnit]]:
        """Around the taking of whole parameters, of the units in the order in which the last step
        used them. Within it nothing else may be called."""
        self.refuse_use()
        self.settle()
        self.meet("a stream of the weights")
        for unit in self.units:
            self.sent_check.check_unwritten(unit)
        self.sent_check.settle()
        self.driver.timeline.pause()
        self.driver.submitted.shorten()
        before, self.state = self.state, StepState.STREAMING
        try:
            yield self.use_order.units_in_order
        finally:
            self.state = before

    # ---- asleep

    def fall_asleep(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """After `between_steps`, while nothing is in flight: the states are on the host, where
        `value_of` has their values; free the memory in flight. Nothing but `wake_up` and `close`
        may be called then."""
        self.gathers.arena.free()
        self.reductions.arena.free()
        if self.host_states is not None:
            self.host_states.free()
        self._value_of, self._before_sleep = value_of, self.state
        self.state = StepState.ASLEEP

    def wake_up(self) -> None:
        """The states are back."""
        self.gathers.arena.allocate()
        self.reductions.arena.allocate()
        self._value_of, self.state = None, self._before_sleep
        self.gathers.note_written()

    def refuse_sleep(self) -> None:
        """Before whatever needs the states on the device."""
        if self.is_asleep:
            raise ConfigurationError("the sharded model is asleep: call wake() first")

    def at_rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of `tensor`, which is one of the states or views it: on the host, asleep."""
        return tensor if self._value_of is None else self._value_of(tensor)

    # ---- between steps

    def settle(self) -> None:
        """Return when nothing is in flight: the units' states and their communicators are free."""
        self.refuse_sleep()
        self.driver.raise_failure()
        self.sent_check.check_unwritten_at_rest(with_content=True)
        self.gathers.drop_spares()
        self.reductions.finish()
        self.gathers.cancel_early_sends()
        self.gathers.join_syncs()
        self._order_check.finish()
        self.sent_check.settle()
        if self.host_states is not None:
            self.host_states.settle()

    def complete_params(self) -> None:
        """Rebuild the parameter shards from their O ranges, which the caller has written.

        Between `settle` and the next forward. Collective over the sharding groups.
        """
        for unit in self.units:
            unit.marks.note_rewritten()
            run_steps(unit.complete_param_steps())
        self.gathers.note_written()

    def close(self) -> None:
        """Finish what is in flight and end the threads, unless the driver was handed in.

        Raises the failure that the communication ended with, without waiting for anything.
        """
        try:
            if not self.is_asleep:
                self.settle()
        finally:
            if self._owns_driver:
                self.driver.close()

    # ---- memory

    def state_nbytes(self) -> dict[str, int]:
        """Bytes at rest on this rank, by state, over all units."""
        total: Counter[str] = Counter()
        for unit in self.units:
            total.update(unit.state_nbytes())
        return dict(total)

    def in_flight_nbytes(self) -> dict[str, int]:
        """Bytes allocated for parameters and for gradients in flight; see MemoryInFlight."""
        params, grads = self.gathers.arena.nbytes, self.reductions.arena.nbytes
        if self.budgets.params is not None:
            params = self.memory.params  # that arena has the memory of all chunks, and what is kept
        return MemoryInFlight(params, grads, 0).allocated

    def num_places_in_use(self) -> int:
        """Places in memory that hold parameters or gradients in flight now."""
        return self.gathers.arena.num_held + self.reductions.arena.num_held


def _refuse_keeping(units: Sequence[HZPUnit], flag: str) -> None:
    if any(unit.is_seated for unit in units):
        raise ConfigurationError(
            f"{flag} is not supported beside CUDA graphs: a graph reads a layer's parameters, and "
            "leaves its gradients, where those of other layers, or micro-batches, come next; drop "
            "one of the two"
        )


def memory_in_flight_of(units: Sequence[HZPUnit], config: ScheduleConfig) -> MemoryInFlight:
    """Size a StepScheduler's memory for `units`. Raises ConfigurationError, see the formula."""
    return memory_in_flight(
        [unit.in_flight(config.grad_slot_nbytes) for unit in units],
        config.depth,
        budget=config.in_flight_nbytes,
    )
