# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Programs for a UnitScheduler on a recording device: which units are used when, over some steps.
The units, their generators and the drivers are the engine's own; only the collectives are not.
Must not know what is asserted about a program.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_asynchzp.comm.driver import Driver, ThreadDriver, new_driver
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.order_check import IssueLog
from megatron_asynchzp.comm.timeline import Timeline
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.step import UnitScheduler
from megatron_asynchzp.zero.unit import HZPUnit
from tests.support.recording_device import Collective, Group, RecordingDevice

WORLD_SIZE = 8


@dataclass(frozen=True)
class UnitShape:
    """A unit: how many elements, and whether its parameters are trained."""

    numel: int = 24
    is_trained: bool = True


@dataclass(frozen=True)
class Step:
    """One training step.

    skipped: units that it does not use; warm_up: forwards ahead of the first backward, as in a
    pipeline; recomputes: backward begins with a second forward; root: this unit stays gathered
    around all others; evaluates: a forward without backward comes first; is_begun_again: it is
    given up in the middle of backward and begins from the start; is_applied: the optimizer runs.
    """

    micro_batches: int = 1
    skipped: frozenset[int] = frozenset()
    warm_up: int = 0
    recomputes: bool = False
    root: int | None = None
    evaluates: bool = False
    is_begun_again: bool = False
    is_applied: bool = True


@dataclass(frozen=True)
class Program:
    """Units sharded by `sizes` over 8 ranks, as `rank` sees them, through `steps`."""

    units: tuple[UnitShape, ...]
    steps: tuple[Step, ...]
    config: ScheduleConfig = ScheduleConfig()
    sizes: tuple[int, int, int] = (2, 4, 8)
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    updates_in_backward: bool = False


@dataclass
class Execution:
    """What a program did. submitted and issued: (lane, unit) in order."""

    device: RecordingDevice
    scheduler: UnitScheduler
    submitted: list[tuple[str, str]] = field(default_factory=list)
    issued: list[tuple[str, str]] = field(default_factory=list)

    @property
    def races(self) -> list[str]:
        return self.device.races

    @property
    def collectives(self) -> list[Collective]:
        return self.device.collectives


class RecordedGroups(ShardGroups):
    """The communicators of a rank, without ranks."""

    def ranks_along(self, axes) -> tuple[int, ...]:
        return tuple(sorted({member for axis in axes for member in axis.axis.members}))

    @classmethod
    def on_rank(cls, sizes: tuple[int, int, int], rank: int) -> "RecordedGroups":
        topology = ShardTopology(WORLD_SIZE, rank, ShardSizes(*sizes))
        return cls.of_topology(
            topology, lambda purpose, axis: Group(f"{purpose} over {axis.members}")
        )


class _WatchedUnit(HZPUnit):
    """Tells when its collectives begin to be issued."""

    issued: list[tuple[str, str]]

    def gather_steps(self, *args):
        self.issued.append(("gather", self.name))
        yield from super().gather_steps(*args)

    def reduce_steps(self, *args):
        self.issued.append(("reduce", self.name))
        yield from super().reduce_steps(*args)

    def sync_grad_steps(self, *args):
        self.issued.append(("grad-sync", self.name))
        yield from super().sync_grad_steps(*args)

    def sync_param_steps(self):
        self.issued.append(("param-sync", self.name))
        yield from super().sync_param_steps()


class _ListedLog(IssueLog):
    """Keeps what was submitted."""

    def __init__(self, submitted: list[tuple[str, str]]):
        super().__init__()
        self.submitted = submitted

    def add(self, lane: str, unit: str) -> None:
        self.submitted.append((lane, unit))
        super().add(lane, unit)


def _new_unit(program: Program, index: int, groups: ShardGroups) -> _WatchedUnit:
    shape = program.units[index]
    values = torch.ones(shape.numel - 3, dtype=program.dtype), torch.ones(3, dtype=program.dtype)
    params = [torch.nn.Parameter(value, shape.is_trained) for value in values]
    return _WatchedUnit(f"u{index}", [("weight", params[0]), ("bias", params[1])], groups)


def _label(device: RecordingDevice, unit: HZPUnit) -> None:
    for state in ("main_param", "main_grad", "model_param"):
        if hasattr(unit, state):
            device.label(getattr(unit, state).storage, f"{state} of {unit.name}")


def _label_slots(done: "Execution") -> None:
    for kind in ("param", "grad"):
        for ring in getattr(done.scheduler, f"{kind}s").rings:
            for index, slot in enumerate(ring._slots):
                done.device.label(slot.storage, f"{kind} slot {index}")
                for scratch in slot.scratch:
                    done.device.label(scratch, f"scratch of {kind} slot {index}")


def delayed_driver(device: RecordingDevice, config: ScheduleConfig, seed: int) -> Driver:
    """A driver whose threads, if it has any, now and then sleep before they act."""
    if config.kind != "threaded":
        return new_driver(config.kind, Timeline(device))
    chance = random.Random(seed)
    return ThreadDriver(Timeline(device), 30.0, delay=lambda: chance.choice((0, 0, 0, 1e-4, 1e-3)))


def execute(
    program: Program,
    seed: int = 0,
    scheduler_class: type[UnitScheduler] = UnitScheduler,
    new_device: Callable[[], RecordingDevice] = RecordingDevice,
) -> Execution:
    """Run `program` to its end and close everything."""
    device = new_device()
    with device.recording(), torch.no_grad():
        groups = RecordedGroups.on_rank(program.sizes, program.rank)
        units = [_new_unit(program, i, groups) for i in range(len(program.units))]
        driver = delayed_driver(device, program.config, seed)
        try:
            scheduler = scheduler_class(units, program.config, driver, 0.5)
            done = Execution(device, scheduler)
            driver.log = _ListedLog(done.submitted)
            if program.updates_in_backward:
                scheduler.update = update
            _label_slots(done)
            for unit in units:
                unit.issued = done.issued
                _label(device, unit)
            for step in program.steps:
                _Runner(scheduler, step).run()
            scheduler.settle()
        finally:
            driver.close()
    return done


def update(unit: HZPUnit) -> None:
    """What the optimizer does to a unit."""
    unit.main_param.storage.add_(unit.main_grad.view(unit.optim_range), alpha=-0.1)


class _Runner:
    """One step, with the calls that HZPRuntime makes from its hooks."""

    def __init__(self, scheduler: UnitScheduler, step: Step):
        self.scheduler, self.step = scheduler, step
        units = enumerate(scheduler.units)
        self.units = [unit for i, unit in units if i not in step.skipped and i != step.root]
        self.root = None
        if step.root is not None and step.root not in step.skipped:
            self.root = scheduler.units[step.root]

    def run(self) -> None:
        if self.step.evaluates:
            self.scheduler.begin_evaluation()
            self._forward()
        if self.step.is_begun_again:
            self._zero_grads()
            self._forward()
            self._backward(self.units[len(self.units) // 2 :])
        self._zero_grads()
        self._micro_batches()
        self.scheduler.sync_grads()
        if self.step.is_applied or self.scheduler.update is not None:
            self._optimizer_step()
            self.scheduler.sync_params()

    def _zero_grads(self) -> None:
        self.scheduler.restart()
        for unit in self.scheduler.units:
            unit.zero_grads()

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
            self.scheduler.release(unit)
        if self.root is not None:
            self.scheduler.release(self.root)

    def _compute(self, unit: HZPUnit) -> None:
        self.scheduler.use(unit)
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
            self.scheduler.release(unit)
            self.scheduler.reduce(unit)

    def _end_backward(self) -> None:
        if self.root is not None:
            self._accumulate(self.root)
            self.scheduler.reduce(self.root)
            self.scheduler.release(self.root)

    def _accumulate(self, unit: HZPUnit) -> None:
        if not unit.is_trained:
            return
        for index, param in enumerate(unit.params):
            param.grad = torch.ones(param.shape, dtype=param.dtype)
            self.scheduler.take_grad(unit, index)

    def _optimizer_step(self) -> None:
        if self.scheduler.update is None:
            for unit in self.scheduler.units:
                if unit.is_trained:
                    update(unit)
