# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the parameters in flight: gathers in the order of use, their places, and rebuilt shards."""

import logging
import math
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, override

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.arena import Arena, Place
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.decisions import ParamsInFlight
from megatron_asynchzp.engine.sharding.in_flight import aligned
from megatron_asynchzp.engine.sharding.memory_map import Extent
from megatron_asynchzp.engine.sharding.residency import Residency
from megatron_asynchzp.engine.zero.directions import BOTH, Direction, Directions
from megatron_asynchzp.engine.zero.early_update import EarlySends
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError


class UseOrder:
    """The orders of this step, and of the last one that had a micro-batch.

    [Note: no micro-batch] A rank whose group has no micro-batch in a step submits what crosses
    groups in the order of its last step that had one.
    """

    def __init__(self, units: Sequence[HZPUnit]):
        self._units = list(units)
        # Units in the order of their first use in a forward, those included that are never
        # gathered.
        self._used: dict[HZPUnit, None] = {}
        self.last_used: list[HZPUnit] = []  # of the last step that had a forward
        # Trained units in the order in which the last micro-batch completed their gradients.
        self._completed: list[HZPUnit] = []
        # Those of the last step that had a backward; None before the first one.
        self.last_completed: list[HZPUnit] | None = None
        # Whether a backward of this step has reduced gradients.
        self.had_backward = False

    def begin_step(self) -> None:
        self._used.clear()
        self._completed, self.had_backward = [], False

    def note_use(self, unit: HZPUnit) -> None:
        self._used.setdefault(unit)

    def note_completed(self, unit: HZPUnit) -> None:
        """Note that no later micro-batch of this step changes the gradients of `unit`."""
        self._completed.append(unit)

    def record_completed(self) -> None:
        self.last_completed = self._completed

    def record_used(self) -> None:
        self.last_used = list(self._used or self.last_used)

    @property
    def units_in_order(self) -> list[HZPUnit]:
        """All units: as this training step first used them, or the last one, and then the rest."""
        return list(dict.fromkeys([*(self._used or self.last_used), *self._units]))


_logger = logging.getLogger("megatron_asynchzp")


class ParamBudget:
    """Parameters that the chunks of a rank keep gathered, in limited memory."""

    def __init__(self, config: ScheduleConfig, driver: Driver, groups: Iterable[Any]):
        budget, new_registered = config.keep_params_nbytes, driver.registered.allocator(groups)
        self.residency = Residency[HZPUnit](budget, lambda unit: unit.gathered_nbytes)
        self._device, record_event = driver.device.torch_device, driver.device.record_event
        self.arena = Arena(aligned(budget), self._device, record_event, new_registered)
        self.takes_free_memory = config.keeps_params_in_free_memory
        self.chunks: list[ParamsInFlight[HZPUnit, Any, _Gather]] = []

    def take_free_memory(self, left_nbytes: int) -> None:
        """Enlarge the budget, once, by the least free bytes of any rank. Collective over all."""
        self.takes_free_memory = False
        least = torch.tensor(left_nbytes, dtype=torch.int64, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)  # pyright: ignore[reportUnknownMemberType]
        if nbytes := aligned(int(least)):
            self.arena.grow(nbytes)
            self.residency.enlarge(nbytes)


@dataclass
class _Gather:
    place: Place
    task: Task | None  # None once the unit is in use
    direction: Direction | None = None  # the only one for which it is right; None: both
    read: set[Direction] | None = None  # those in which layers have read it; None before a use


class Gathers(ParamsInFlight[HZPUnit, Any, _Gather]):
    """Gathers units ahead of their use, and rebuilds their shards after the optimizer.

        gather      | u0 | u1 |      | u2 | ...                            parameters in flight
        main        |    | F u0 | F u1 | F u2 | B u2 | B u1 | ...
        param-sync  | u0 | u1 | u2 |                                       after the optimizer

    ParamsInFlight decides which units are gathered, kept and resharded, and when.
    """

    def __init__(
        self,
        units: Sequence[HZPUnit],
        config: ScheduleConfig,
        nbytes: int,
        driver: Driver,
        shared: ParamBudget | None = None,
    ):
        self._units, self._driver, self._device = units, driver, driver.device
        self.early_sends, self.use_order = EarlySends(), UseOrder(units)
        self._directions = Directions[HZPUnit]()
        self.warned: set[str] = set()  # topics of logged warnings, each once
        self.is_captured = False  # a CUDA graph has gathers in it
        self._graph_rebuilds = False  # and it rebuilds the shards for training
        # Units whose parameters had views when their memory was about to be reused.
        self.viewed: set[HZPUnit] = set()
        self._outside: set[str] = set()  # sizes of units that do not use the arena's memory
        self._syncs: dict[HZPUnit, Task] = {}
        self._shards_written: dict[str, Any] = {}
        self.note_written()
        if shared is None:
            device, groups = units[0].device, [a.group for u in units for a in u.groups.unshard]
            new_registered = driver.registered.allocator(groups)
            self.arena = Arena(0, device, self._device.record_event, new_registered)
        else:
            self.arena = shared.arena
        before = self.arena.nbytes
        super().__init__(
            {unit: unit.in_flight(config.grad_slot_nbytes) for unit in units},
            {unit: unit.size_key for unit in units},
            config.depth,
            self.arena,
            [] if shared is None else shared.chunks,
            None if shared is None else shared.residency,
            self.early_sends,
        )
        # The arena has grown by the seats already.
        if more := nbytes - (self.arena.nbytes - before):
            self.arena.grow(more)

    # ---- use

    def unshard(self, unit: HZPUnit, direction: Direction | None = None) -> None:
        """Make the full parameters of `unit` readable on the current stream, in one direction."""
        if self.is_training:
            self.use_order.note_use(unit)
        if unit.is_always_unsharded:
            self.restore_shard(unit)
            self.rebuild_now(unit)
            if (sync := self._syncs.pop(unit, None)) is not None:
                sync.wait()
            self.note_shard_used(unit)
        elif (expected := super().unshard(unit)) is not None:
            self._warn_once(
                "departure",
                f"step {self._driver.step} uses {unit.name} where the step before used "
                f"{expected.name}: the rest of this step is gathered on demand",
            )
        if len(unit.code_gathers) > 1:
            self._note_direction(unit, self._gathered[unit].handle, direction)

    def _note_direction(self, unit: HZPUnit, handle: _Gather, direction: Direction | None) -> None:
        """Gather `unit` again if what was gathered is not right for this use."""
        if handle.read is None:
            handle.read = self._directions.begin(unit) if self.is_training else set[Direction]()
        handle.read |= BOTH if direction is None else {direction}
        if handle.direction is not None and handle.read != {handle.direction}:
            handle.direction = None
            self.restore_shard(unit)
            readers = (self._device.record_event(),)
            self._submit_gather(unit, handle.place, None, readers).wait()

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self.warned:
            self.warned.add(topic)
            if self._units[0].groups.topology.rank == 0:
                _logger.warning("%s (logged once)", text)

    @override
    def restart(self, is_training: bool = True) -> None:
        if is_training:
            self._directions.restart()
        super().restart(is_training)

    # ---- what ParamsInFlight decides

    def start_unshard(self, unit: HZPUnit, extent: Extent) -> _Gather:
        place = self.arena.place_at(
            extent,
            unit.size_key,
            unit.layout.padded_numel,
            unit.dtype,
            unit.size_key in self._outside and unit not in self.seats,
        )
        direction = None
        if len(unit.code_gathers) > 1:
            is_training = self.is_training
            direction = self._directions.expected(unit) if is_training else Direction.FORWARD
        task = self._submit_gather(unit, place, direction, place.ready)
        return _Gather(place, task, direction)

    def _submit_gather(
        self, unit: HZPUnit, place: Place, direction: Direction | None, readers: Sequence[Any]
    ) -> Task:
        name = unit.name if direction is None else f"{unit.name} for {direction.value}"
        return self._driver.submit(
            Task(
                "gather",
                name,
                unit.groups.unshard,
                lambda: unit.unshard_for_layers_steps(place.storage, direction),
                # The last write of the shard, and the last readers of the place.
                ready=(self._shards_written.pop("gather", None), *readers),
                after=(self._syncs.get(unit),),
            )
        )

    def wait_for_unshard(self, unit: HZPUnit, handle: _Gather) -> None:
        self._await(handle)
        self._syncs.pop(unit, None)  # the gather has waited for it
        place = handle.place
        unit.to_unsharded(place.storage, place.views_for(unit.views_key, unit.views_of))

    def _await(self, handle: _Gather) -> None:
        task, handle.task = handle.task, None
        assert task is not None  # this is the first wait
        task.wait()

    def finish_reshard(self, unit: HZPUnit, handle: _Gather) -> Any:
        unit.reshard()
        place = handle.place
        # Another thread, such as the watchdog's, may hold a collective's handle for a moment.
        if place.is_viewed(patiently=not place.is_outside):
            is_in_graph = unit in self.seats or self.is_captured
            flag = "--cuda-graph-impl" if is_in_graph else "--use-nccl-ub"
            if is_in_graph or self.arena.is_registered:
                raise ConfigurationError(
                    f"{unit.name} keeps views of its parameters outside autograd, and with CUDA "
                    f"graphs or registered memory the next layer overwrites them. Drop {flag}."
                )
            self._leave_to_views(unit, place)
        return None if place.is_outside else self._device.record_event()

    def _leave_to_views(self, unit: HZPUnit, place: Place) -> None:
        """Leave the memory of `place` to the views of it that still exist.

        [Note: views that outlive the unit] Saved-tensor hooks see what autograd saves, not what a
        module keeps elsewhere (an attribute of ctx, a cache). Reusing the memory under such a view
        would silently give wrong numbers (law 5). From now on units of this size are gathered into
        new memory, which is freed with its last view.
        """
        self.viewed.add(unit)
        self._warn_once(
            "views",
            f"{unit.name} keeps views of its parameters outside autograd: their "
            f"{place.storage.nbytes / 2**20:.1f} MiB stay in memory for as long as it does",
        )
        if not place.is_outside:
            self._outside.add(unit.size_key)
            self.arena.abandon(place)

    def cancel_unshard(self, unit: HZPUnit, handle: _Gather) -> Any:
        self._await(handle)
        return None if handle.place.is_outside else self._device.record_event()

    def start_param_sync(self, unit: HZPUnit) -> None:
        self._syncs[unit] = self._driver.submit(
            Task(
                "param-sync",
                unit.name,
                unit.groups.param_sync,
                unit.sync_param_steps,
                ready=(self._shards_written.pop("param-sync", None),),
                after=(self._syncs.get(unit),),  # an early send
            )
        )

    def note_early_sends_stopped(self) -> None:
        self._warn_once(
            "early",
            "the model is used again between a backward and the update, so parameters are sent "
            "after the update; put all micro-batches but the last into no_sync(), which is faster",
        )

    def note_growth(self, unit: HZPUnit) -> None:
        self._warn_once(
            "growth",
            f"{unit.name} is used with more units at a time than there is memory in flight "
            f"for: {unit.gathered_nbytes / 2**20:.1f} MiB are added to it",
        )

    # ---- captured graphs

    @contextmanager
    def rehearsing(self) -> Generator[None]:
        """Wrap the capture of CUDA graphs: seats hold zeros and own the views of graphs."""
        places: list[Place] = []
        for unit, seat in self.seats.items():
            place = self.arena.place_at(seat, unit.size_key, unit.layout.padded_numel, unit.dtype)
            for event in place.ready:
                self._device.wait_event(event)
            unit.to_unsharded(place.storage.zero_(), place.views_for(unit.views_key, unit.views_of))
            places.append(place)
        # Streams that warm up wait for no event.
        self._device.synchronize(self._device.record_event(), math.inf)
        try:
            yield
        finally:
            for unit in self.seats:
                unit.reshard()
            for place in places:
                place.count_own_views()
                self.arena.note_last_user(place.extent, self._device.record_event())

    @override
    def prefetch(self) -> None:
        if self._driver.in_graph or not (self._graph_rebuilds and self.is_training):
            super().prefetch()

    def leave_to_graph(self) -> None:
        """Leave the shards and the gathers of training to a graph, see [Note: captured step]."""
        self._graph_rebuilds = True
        self._to_rebuild.clear()

    def enter_graph(self, rebuilds: bool) -> None:
        """Begin the captured part."""
        self.is_captured = True
        self.forget_events()
        self.note_written()
        if rebuilds:
            self.rebuild(unit for unit in self.use_order.units_in_order if unit.is_trained)

    def forget_events(self) -> None:
        """Forget what ended on one side of a capture, where the other side cannot wait for it."""
        self.arena.forget_users()
        self._syncs.clear()
        self._shards_written.clear()

    # ---- shards

    def start_early_send(self, unit: HZPUnit) -> None:
        send, gathered = self.early_sends.send_of(unit), self._gathered.get(unit)
        gather = None if gathered is None else gathered.handle.task
        # One after the other, because each preview gathers into a temporary copy of the shard.
        before = self._driver.latest.get("param-sync") if unit.is_main_param_aliased else None
        self._syncs[unit] = send.task = self._driver.submit(
            Task(
                "param-sync",
                unit.name,
                unit.groups.param_sync,
                lambda: unit.preview_param_steps(send.update),
                ready=(self._shards_written.pop("param-sync", None),),
                # The reduction of the gradients, and tasks that may still use the shard.
                after=(send.grads, gather, self._syncs.get(unit), before),
            )
        )

    def start_syncs(self, done: Collection[HZPUnit] = ()) -> None:
        """Rebuild all shards except those of `done`, in this step's order, and gather again."""
        self.drop_spares()
        self.restart()
        self.note_written()
        self.early_sends.forget()
        in_order = self.use_order.units_in_order
        units = [unit for unit in in_order if unit.is_trained and unit not in done]
        if self._graph_rebuilds:
            self._to_rebuild = dict.fromkeys(units)  # for an evaluation or a checkpoint before it
        else:
            self.rebuild(units)

    def rebuild_in_last_order(self) -> None:
        """Rebuild the shards in the last step's order, as ranks with a micro-batch do."""
        for unit in self.use_order.last_used:
            self.rebuild_now(unit)
            self.note_shard_used(unit)

    def await_sync(self, unit: HZPUnit) -> None:
        """Wait until the shard of `unit` is up to date: the use of a kept unit has not waited."""
        if (sync := self._syncs.get(unit)) is not None:
            sync.wait()

    def join_syncs(self) -> None:
        """Wait until every shard is up to date or sent early, and no sync reads the states."""
        self.rebuild_remaining()
        if not self._syncs:
            return
        for sync in self._syncs.values():
            sync.wait()
        self._syncs.clear()
        # Later gathers wait for this event, because the tasks are forgotten.
        self.note_written()

    def note_written(self) -> None:
        """Let gathers wait for the current stream, which has written parameter shards."""
        # Only each lane's next task waits: its later tasks come after that one.
        self._shards_written = dict.fromkeys(("gather", "param-sync"), self._device.record_event())

    # ---- steps

    def begin_evaluation(self) -> None:
        self._driver.timeline.pause()
        self._driver.submitted.shorten()
        self.restart(is_training=False)

    def begin_step(self) -> None:
        self.early_sends.await_all()  # of an abandoned backward
        self.cancel_early_sends()
        self.early_sends.forget()
        self.restart()
        self.prefetch()
