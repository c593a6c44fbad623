# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the step of a model chunk: gathers, reductions, comparisons and rebuilt shards."""

import enum
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch

from megatron_asynchzp.engine.comm.collectives import all_reduce_steps, run_steps
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.order_check import OrderCheck
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import (
    FP32_NBYTES,
    MemoryInFlight,
    memory_in_flight,
)
from megatron_asynchzp.engine.sharding.layout import grad_pieces
from megatron_asynchzp.engine.sharding.residency import Residency
from megatron_asynchzp.engine.zero.gathers import Gathers, ParamBudget
from megatron_asynchzp.engine.zero.reductions import Reductions
from megatron_asynchzp.engine.zero.sent_check import SentCheck
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class KeepBudgets:
    """Budgets of parameters and gradients that a rank's chunks keep for later micro-batches."""

    params: ParamBudget | None = None
    grads: Residency[HZPUnit] | None = None

    @classmethod
    def of(
        cls, config: ScheduleConfig, driver: Driver, groups: Iterable[ShardGroups] = ()
    ) -> "KeepBudgets":
        params = grads = None
        if config.keep_params_nbytes or config.keeps_params_in_free_memory:
            unshard = [axis.group for of in groups for axis in of.unshard]
            params = ParamBudget(config, driver, unshard)
        if config.keep_grads_nbytes:
            # The current unit's sum counts: unlike its parameters, it is nowhere else in memory.
            grads = Residency[HZPUnit](
                config.keep_grads_nbytes,
                lambda unit: FP32_NBYTES * unit.layout.padded_numel,
                counts_own=True,
            )
        return cls(params, grads)

    def grad_record(self) -> list[str]:
        """Return the units whose gradients the last step completed, in order, for a checkpoint.

        [Note: kept after a resume] The choice of kept gradients decides how sums are grouped, hence
        their last bits, and follows from the order of the previous step. A process that resumes a
        run has no such step: it takes the order from the checkpoint.
        """
        return [] if self.grads is None else [unit.name for unit in self.grads.record]

    def expect_grads(self, names: Sequence[str], units: Iterable[HZPUnit]) -> None:
        """Continue from the grad_record of a checkpoint; another pipeline's is ignored."""
        by_name = {unit.name: unit for unit in units}
        if self.grads is not None and by_name.keys() >= set(names):
            self.grads.expect([by_name[name] for name in names])


class StepState(enum.Enum):
    """State of a model chunk within or between steps; see StepScheduler.state."""

    IDLE = "idle"
    """Since `zero_grads`: there is no gradient."""
    COLLECTING = "collecting"
    """From the first forward or backward of a step until its gradients are complete."""
    COMPLETE = "complete"
    """Since `sync_grads`: gradients are complete, and may be used."""
    STREAMING = "streaming"
    """Between two steps, within `streaming`; afterwards as before."""
    ASLEEP = "asleep"
    """Between two steps: states are on the host, and no memory is in flight."""


class OnHost(Protocol):
    """States on the host (HostStates), as a step sees them."""

    def settle(self) -> None: ...
    def free(self) -> None: ...


class StepScheduler:
    """Gathers the units of a model chunk ahead of their use and reduces their gradients.

        gather      | u0 | u1 |      | u2 | ...                            gathers
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        reduce                                       | u2 | u1 |           reductions
        grad-sync   (last micro-batch)                    | u2 | u1 |      reductions
        param-sync  | u0 | u1 | u2 |                                       gathers

    The main thread takes every decision ([Note: decisions]). Chunks of a rank that share `driver`
    have one order.
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
        self.step = 0  # number of the step that began last
        self.num_begun = 0  # steps that have begun, repetitions included
        self.state = StepState.IDLE
        # Whether backward reduces gradients over the whole sharding group, see no_sync.
        self.is_last_micro_batch = False
        self._gathers_for = "training"  # kind of the last gathers, see barrier_on_kind_change
        self.host_states: OnHost | None = None
        # The optimizer's settings, which have to be the same on all ranks.
        self.settings_of_update: Callable[[], Mapping[str, str]] = dict[str, str]
        self._value_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._before_sleep = self.state
        # Whether sync_grads sets `reached` to the units with gradients on any rank.
        self.agrees_on_reached, self.reached = False, set[HZPUnit]()
        self.schedule = config
        self.memory = memory_in_flight_of(self.units, config)
        if config.keep_params_nbytes or config.keeps_params_in_free_memory:
            _refuse_keeping(self.units, "--asynchzp-keep-params-gb")
        if config.keep_grads_nbytes:
            _refuse_keeping(self.units, "--asynchzp-keep-grads-gb")
        all_groups = list(dict.fromkeys(unit.groups for unit in self.units))
        self.budgets = budgets or KeepBudgets.of(config, driver, all_groups)
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
        axes = [axis for groups in all_groups for axis in groups.all_reduce_axes]
        # With experts all ranks exchange tokens in every layer, so all compute in step.
        num_in_step = all_groups[0].num_axes_in_step if len(all_groups) == 1 else len(axes)
        self._groups_may_differ = num_in_step < len(axes)
        self._checks_order = config.checks_order
        self.order_check = OrderCheck(driver, axes, num_in_step, self.units[0].device)
        self.sent_check = SentCheck(
            self.units, driver, axes, self.early_sends, self.gathers.await_sync
        )

    # ---- one micro-batch

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Wrap all micro-batches of a step except the last.

        In the last, backward reduces each unit's gradients over the whole sharding group. A loop
        without no_sync leaves that to `sync_grads`, with the same numbers.
        """
        self.is_last_micro_batch = False
        yield
        self.is_last_micro_batch = True

    def reduce(self, unit: HZPUnit) -> None:
        self.use_order.had_backward = True
        self.state = StepState.COLLECTING
        if not unit.is_trained:
            return
        # On a CPU each lane issues by itself. A pending comparison uses the gradients'
        # communicators, where one rank's reduction must not meet another's comparison.
        self.order_check.wait()
        if self.reductions.keep(unit, self.is_last_micro_batch):
            return
        self.reductions.start_reduction(unit)
        if self.is_last_micro_batch:
            self.use_order.note_completed(unit)
            self._complete_grads(unit)

    def _complete_grads(self, unit: HZPUnit) -> None:
        self.early_sends.note_grads(unit)
        grads = self.reductions.start_sync(unit)
        if self.early_sends.choose(unit, grads, self.num_begun):  # [Note: early update]
            self.gathers.send_early(unit)

    # ---- one step

    def barrier_on_kind_change(self, kind: str) -> None:
        """Wait for the ranks that gather together before gathers of another kind begin.

        If some evaluate while others train, gathers of different sizes would meet: gloo ends the
        process, and NCCL may return anything.
        """
        if kind == self._gathers_for:
            return
        groups = self.units[0].groups
        # NCCL needs the same operation on all ranks of a communicator.
        if axes := groups.reduce_axes_within(groups.topology.sizes.param):
            # In the order check's dtype; `value` lives until the sum has ended.
            value = torch.zeros(4, dtype=torch.int64, device=self.units[0].device)
            start, ready = partial(all_reduce_steps, value, axes), self.driver.device.record_event()
            after = [self.driver.latest.get(lane) for lane in ("reduce", "grad-sync", "order")]
            meeting = Task("gather", f"no unit, before {kind},", axes, start, (ready,), after)
            self.driver.submit(meeting).wait()
        self._gathers_for = kind

    def zero_grads(self, number: int | None = None) -> None:
        """Start a step, or repeat step `number`: nothing of the last one is in flight."""
        self.check_usable()
        self.driver.raise_failure()
        self.sent_check.check_unwritten_at_rest(with_content=not self.driver.device.runs_ahead)
        self.order_check.send_answer()
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
        """Wait until no early send, sync or gather reads main parameters or gradients."""
        self.gathers.drop_spares()
        self.gathers.join_syncs()

    def sync_grads(self) -> None:
        """Complete the gradients: their fragments become the sum over all ranks x scale.

        Starts the reductions that backward did not start, waits for all, and compares the ranks'
        tasks. Collective. All ranks of a sharding group that submitted different tasks raise
        OrderMismatch.
        """
        self.check_usable()
        self.order_check.wait()
        if self.use_order.had_backward or any(map(self.reductions.has_pending, self.units)):
            self.use_order.record_completed()
        elif self.state is not StepState.COMPLETE:
            self._sync_without_micro_batch()
        for unit in self.units:
            if not unit.is_trained:
                continue
            # Gradients that were kept for a micro-batch that did not come, or those of a backward
            # through no module (of a gradient's norm).
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
        """Submit the tasks that cross groups, in the order of [Note: no micro-batch]."""
        if (order := self.use_order.last_completed) is None:
            if self._groups_may_differ and any(unit.is_trained for unit in self.units):
                raise ConfigurationError(
                    "this rank has had no micro-batch yet, but each group of ranks needs one in "
                    "the first step of a process. Give it an empty one, as model(tokens[:0])."
                )
            return
        self.gathers.rebuild_in_last_order()
        for unit in order:
            self.reductions.reopen(unit)  # a micro-batch with several backwards does so
            self._complete_grads(unit)

    def _agree_on_reached(self) -> set[HZPUnit]:
        mine = self.reductions.reached
        topology = self.units[0].groups.topology
        if topology.sizes.grad == topology.world_size:
            return set(mine)
        own = torch.tensor([unit in mine for unit in self.units], dtype=torch.int32)
        flags = own.to(self.units[0].device)
        self.order_check.reduce_max(flags)
        are_reached = cast("list[int]", flags.tolist())  # pyright: ignore[reportUnknownMemberType]
        return {unit for unit, flag in zip(self.units, are_reached, strict=True) if flag}

    @property
    def are_grads_synced(self) -> bool:
        is_complete = self.state is StepState.COMPLETE
        return is_complete and not any(map(self.reductions.has_pending, self.units))

    def _check_order(self) -> None:
        if self.driver.in_graph:
            return  # the captured tasks are compared after the first replay
        if not self._checks_order:
            self.driver.submitted.drain()
            return
        self.order_check.start(self.settings_of_update())
        # On a device the host would wait here. There the next comparison raises, or `settle` does
        # before a checkpoint is written.
        if not self.driver.device.runs_ahead:
            self.order_check.finish()

    def skip_update(self) -> None:
        self.early_sends.note_outcome(self.num_begun, did_stand=False)
        self.gathers.cancel_early_sends()

    def sync_params(self, skip_unchanged: bool = False) -> None:
        """Rebuild the parameter shards from main_param, in the background, after the optimizer.

        With `skip_unchanged` (collective) early sends are compared with the result of the update,
        and only differences are sent again ([Note: compared with what was sent]).
        """
        self.driver.timeline.end_computation()
        current = self.sent_check.already_current() if skip_unchanged else []
        self.early_sends.note_outcome(self.num_begun, bool(current))
        self.sent_check.note_update(current, self.reached if skip_unchanged else None)
        self.gathers.start_syncs(current)

    # ---- checks of the state

    def check_between_steps(self, caller: str) -> None:
        """Raise ConfigurationError if `caller` cannot read or move the states now."""
        self.check_usable()
        if caller == "sleep()" and (
            self.gathers.is_captured or any(u.is_seated for u in self.units)
        ):
            raise ConfigurationError(
                "sleep() does not work with CUDA graphs, which read the states at fixed addresses. "
                "Drop --cuda-graph-impl, or do not call sleep()."
            )
        if self.is_in_step:
            raise ConfigurationError(
                f"{caller} within a step is not allowed. Call it after step() or zero_grad()."
            )

    @property
    def is_in_step(self) -> bool:
        return self.state is StepState.COLLECTING

    @property
    def is_asleep(self) -> bool:
        return self.state is StepState.ASLEEP

    def check_usable(self) -> None:
        self.check_awake()
        if self.state is StepState.STREAMING:
            raise ConfigurationError(
                "an iterator of whole parameters is open. Exhaust it, or close() it, first."
            )

    @contextmanager
    def streaming(self) -> Generator[Sequence[HZPUnit]]:
        """Wrap a stream of whole parameters; yields the units in the order of their use."""
        self.check_usable()
        self.settle()
        self.barrier_on_kind_change("a stream of the weights")
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
        """Free the memory in flight; `value_of` returns the values of states on the host."""
        self.gathers.arena.free()
        self.reductions.arena.free()
        if self.host_states is not None:
            self.host_states.free()
        self._value_of, self._before_sleep = value_of, self.state
        self.state = StepState.ASLEEP

    def wake_up(self) -> None:
        self.gathers.arena.allocate()
        self.reductions.arena.allocate()
        self._value_of, self.state = None, self._before_sleep
        self.gathers.note_written()

    def check_awake(self) -> None:
        if self.is_asleep:
            raise ConfigurationError("the sharded model is asleep. Call wake() first.")

    def current_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of `tensor`, a state or its view: on the host while asleep."""
        return tensor if self._value_of is None else self._value_of(tensor)

    # ---- between steps

    def settle(self, reads_values: bool = True) -> None:
        """Wait until nothing is in flight: states and communicators are free.

        Args:
            reads_values: Look at the values of parameters at rest, for which the host waits.
        """
        self.check_awake()
        self.driver.raise_failure()
        self.sent_check.check_unwritten_at_rest(with_content=reads_values)
        self.gathers.drop_spares()
        self.reductions.finish()
        self.gathers.cancel_early_sends()
        self.gathers.join_syncs()
        self.order_check.finish()
        self.sent_check.settle()
        if self.host_states is not None:
            self.host_states.settle()

    def complete_params(self) -> None:
        """Rebuild the parameter shards from O ranges that the caller has written. Collective."""
        for unit in self.units:
            unit.marks.note_rewritten()
            run_steps(unit.complete_param_steps())
        self.gathers.note_written()

    def close(self) -> None:
        """Finish all operations, unless the communication has failed, and end the threads."""
        try:
            if not self.is_asleep:
                self.settle()
        finally:
            if self._owns_driver:
                self.driver.close()

    # ---- memory

    def state_nbytes(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for unit in self.units:
            total.update(unit.state_nbytes())
        return dict(total)

    def in_flight_nbytes(self) -> dict[str, int]:
        params, grads = self.gathers.arena.nbytes, self.reductions.arena.nbytes
        if self.budgets.params is not None:
            params = self.memory.params  # the arena has all chunks' and kept parameters
        return MemoryInFlight(params, grads, 0).allocated

    def num_places_in_use(self) -> int:
        return self.gathers.arena.num_held + self.reductions.arena.num_held


def _refuse_keeping(units: Sequence[HZPUnit], flag: str) -> None:
    if any(unit.is_seated for unit in units):
        raise ConfigurationError(
            f"{flag} does not work with CUDA graphs: a graph's parameters and gradients lie where "
            "the next layer's overwrite them. Drop one of the two."
        )


def memory_in_flight_of(units: Sequence[HZPUnit], config: ScheduleConfig) -> MemoryInFlight:
    """Size the memory of a StepScheduler; raises ConfigurationError, see memory_in_flight."""
    return memory_in_flight(
        [unit.in_flight(config.grad_slot_nbytes) for unit in units],
        config.depth,
        budget=config.in_flight_nbytes,
    )
