# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Programs for a StepScheduler on a recording device: which units are used when, over some steps.
The units, their generators and the drivers are the engine's own; only the collectives are not.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.drivers import ThreadDriver, start_driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import Timeline
from megatron_asynchzp.engine.schedule import AUTO, ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.engine.zero.unit import HZPUnit
from scripts.testbed.contenders.adam import owned_params
from tests.support.engine import on_submit, with_memory
from tests.support.recording_device import Collective, Group, RecordingDevice

WORLD_SIZE = 8


@dataclass(frozen=True)
class UnitShape:
    """A unit: how many elements, whether its parameters are trained, and have a seat."""

    numel: int = 24
    is_trained: bool = True
    is_seated: bool = False


@dataclass(frozen=True)
class Step:
    """One training step.

    skipped: units that it does not use; warm_up: forwards ahead of the first backward, as in a
    pipeline; recomputes: backward begins with a second forward; root: this unit stays gathered
    around all others; evaluates: a forward without backward comes first; is_begun_again: it is
    given up in the middle of backward and begins from the start; is_applied: the optimizer runs;
    is_clipped: on other gradients than those that were complete in backward.
    """

    micro_batches: int = 1
    skipped: frozenset[int] = frozenset()
    warm_up: int = 0
    recomputes: bool = False
    root: int | None = None
    evaluates: bool = False
    is_begun_again: bool = False
    is_applied: bool = True
    is_clipped: bool = False


@dataclass(frozen=True)
class Program:
    """Units sharded by `sizes` over 8 ranks, as `rank` sees them, through `steps`.

    memory: in flight, from 0 (what one layer needs) to 1 (the default); wire: in which gradients
    travel; sends_early: see EngineTrainer.
    """

    units: tuple[UnitShape, ...]
    steps: tuple[Step, ...]
    config: ScheduleConfig = ScheduleConfig()
    sizes: tuple[Any, ...] = (2, 4, 8)
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    sends_early: bool | None = None
    memory: float = 1.0
    wire: torch.dtype = torch.float32


@dataclass
class Execution:
    """What a program did. submitted and issued: (lane, unit) in order."""

    device: RecordingDevice
    scheduler: StepScheduler
    submitted: list[tuple[str, str]] = field(default_factory=list)
    issued: list[tuple[str, str]] = field(default_factory=list)

    @property
    def races(self) -> list[str]:
        return self.device.races

    @property
    def collectives(self) -> list[Collective]:
        return self.device.collectives


def recorded_groups(sizes: tuple[Any, ...], rank: int) -> ShardGroups:
    """The communicators of `rank` without ranks."""
    topology = ShardTopology(WORLD_SIZE, rank, ShardSizes(*sizes))
    return ShardGroups.of_topology(topology, range(WORLD_SIZE), Group)


def new_unit(
    name: str, shape: UnitShape, groups: ShardGroups, dtype: torch.dtype = torch.bfloat16
) -> HZPUnit:
    """A unit of two parameters."""
    values = torch.ones(shape.numel - 3, dtype=dtype), torch.ones(3, dtype=dtype)
    params = [torch.nn.Parameter(value, shape.is_trained) for value in values]
    named = [("weight", params[0]), ("bias", params[1])]
    return HZPUnit(name, named, groups, is_seated=shape.is_seated)


def _label(device: RecordingDevice, unit: HZPUnit) -> None:
    for state in ("main_param", "main_grad", "model_param"):
        if hasattr(unit, state):
            device.label(getattr(unit, state).storage, f"{state} of {unit.name}")


def _label_places(done: "Execution") -> None:
    scheduler = done.scheduler
    for kind, arena in (("param", scheduler.gathers.arena), ("grad", scheduler.reductions.arena)):
        for memory in arena.memory:
            done.device.label(memory, f"{kind} place")


class _DelayedDriver(ThreadDriver):
    def __init__(self, device: RecordingDevice, seed: int):
        self._chance = random.Random(seed)
        super().__init__(Timeline(device), 30.0)

    def run(self, task: Task) -> None:
        time.sleep(self._chance.choice((0, 0, 0, 1e-4, 1e-3)))
        super().run(task)


def delayed_driver(device: RecordingDevice, config: ScheduleConfig, seed: int) -> Driver:
    """A driver whose threads, if it has any, now and then sleep before they act."""
    if device.runs_ahead or config.kind not in (AUTO, "threaded"):
        driver = start_driver(config, device)
    else:
        driver = _DelayedDriver(device, seed)
    device.attend(driver)
    return driver


def _note_tasks(driver: Driver, done: Execution) -> None:
    def note(task: Task) -> None:
        start, entry = task.start, (task.lane, task.unit)

        def noted_start():
            done.issued.append(entry)
            return start()

        done.submitted.append(entry)
        task.start = noted_start

    on_submit(driver, note)


def execute(
    program: Program,
    seed: int = 0,
    scheduler_class: type[StepScheduler] = StepScheduler,
    new_device: Callable[[], RecordingDevice] = RecordingDevice,
) -> Execution:
    """Run `program` to its end and close everything."""
    device = new_device()
    with device.recording(), torch.no_grad():
        groups = recorded_groups(program.sizes, program.rank)
        groups = replace(groups, grad_dtype=program.wire)
        units = [
            new_unit(f"u{index}", shape, groups, program.dtype)
            for index, shape in enumerate(program.units)
        ]
        in_flight = [unit.in_flight(program.config.grad_slot_nbytes) for unit in units]
        config = with_memory(program.config, in_flight, program.memory)
        driver = delayed_driver(device, config, seed)
        try:
            scheduler = scheduler_class(units, config, driver, 0.5)
            done = Execution(device, scheduler)
            _note_tasks(driver, done)
            if program.sends_early is not None:
                owned = {unit: owned_params(unit) for unit in units if unit.is_trained}
                scheduler.early_sends.early_update = EarlyUpdate(
                    new_optimizer(owned), owned, program.sends_early
                )
            _label_places(done)
            for unit in units:
                _label(device, unit)
            for step in program.steps:
                Runner(scheduler, step).run()
            scheduler.settle()
        finally:
            driver.close()
    return done


def new_optimizer(owned: dict[HZPUnit, list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Which does the same."""
    params = [param for params in owned.values() for param in params]
    params = params or [torch.nn.Parameter(torch.zeros(1))]
    return torch.optim.SGD(params, lr=0.1, foreach=False)


def update(unit: HZPUnit) -> None:
    """What the optimizer does to a unit."""
    for value, grad in zip(unit.main_param_fragments(), unit.main_grad_fragments(), strict=True):
        value.add_(grad, alpha=-0.1)  # not the gaps


class Runner:
    """One step, with the calls that HZPRuntime makes from its hooks."""

    def __init__(self, scheduler: StepScheduler, step: Step):
        self.scheduler, self.step = scheduler, step
        units = enumerate(scheduler.units)
        self.units = [unit for i, unit in units if i not in step.skipped and i != step.root]
        self.root = None
        if step.root is not None and step.root not in step.skipped:
            self.root = scheduler.units[step.root]

    def run(self) -> None:
        if self.step.evaluates:
            self.scheduler.gathers.begin_evaluation()
            self._forward()
        if self.step.is_begun_again:
            self.scheduler.zero_grads()
            self._forward()
            self._backward(self.units[len(self.units) // 2 :])
        self.scheduler.zero_grads()
        self._micro_batches()
        self.scheduler.sync_grads()
        if self.step.is_applied:
            self._optimizer_step()
            self.scheduler.sync_params(skip_unchanged=not self.step.is_clipped)

    def _micro_batches(self) -> None:
        total = self.step.micro_batches
        ahead = min(self.step.warm_up, total - 1)
        for _ in range(ahead):
            self._forward()
        for index in range(total):
            if index + ahead < total:
                self._forward()
            self.scheduler.is_last_micro_batch = index == total - 1
            self._backward(self.units)
            self._end_backward()

    def _forward(self) -> None:
        if self.root is not None:
            self._compute(self.root)
        for unit in self.units:
            self._compute(unit)
            self.scheduler.gathers.reshard(unit)
        if self.root is not None:
            self.scheduler.gathers.reshard(self.root)

    def _compute(self, unit: HZPUnit) -> None:
        self.scheduler.gathers.unshard(unit)
        for param in unit.params:
            param.sum()

    def _backward(self, units: list[HZPUnit]) -> None:
        if self.root is not None:
            self._compute(self.root)
        for unit in reversed(units):
            if self.step.recomputes:
                self._compute(unit)
            self._compute(unit)
            self._accumulate(unit)
            self.scheduler.gathers.reshard(unit)
            self.scheduler.reduce(unit)

    def _end_backward(self) -> None:
        if self.root is not None:
            self._accumulate(self.root)
            self.scheduler.reduce(self.root)
            self.scheduler.gathers.reshard(self.root)

    def _accumulate(self, unit: HZPUnit) -> None:
        if not unit.is_trained:
            return
        for index, param in enumerate(unit.params):
            param.grad = torch.ones(param.shape, dtype=param.dtype)
            self.scheduler.reductions.take(unit, (index,))

    def _optimizer_step(self) -> None:
        for unit in self.scheduler.units:
            if unit.is_trained:
                update(unit)
