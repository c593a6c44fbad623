# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Four ranks in a layout of Megatron, as the command log of each: the engine's own collectives
between those of Megatron ("foreign" here), which the thread that computes issues.
"""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.zero.step import StepScheduler
from megatron_asynchzp.zero.unit import HZPUnit
from tests.support.device_queues import Command, CommandLog, Launch
from tests.support.recording_device import Group
from tests.support.scheduler_program import (
    Runner,
    Step,
    UnitShape,
    delayed_driver,
    new_unit,
    recorded_groups,
)

WORLD = (0, 1, 2, 3)
NEAR, FAR = ((0, 1), (2, 3)), ((0, 2), (1, 3))
LAYERS, MICRO_BATCHES, STEPS = 2, 2, 2
PAUSES, LONGEST_PAUSE_S = 0.01, 5e-4
_CP_STREAM = "stream of context parallelism"


@dataclass(frozen=True)
class Layout:
    """foreign: the ranks that share what is not data; sharding, experts: the sharding groups of
    dense parameters and of experts; sizes: of the dense ones."""

    name: str
    foreign: tuple[tuple[int, ...], ...]
    sharding: tuple[tuple[int, ...], ...]
    sizes: tuple[int, int, int] = (2, 2, 2)
    experts: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.name.upper()}2 x DP2"


LAYOUTS = (
    Layout("tp", foreign=NEAR, sharding=FAR),
    Layout("cp", foreign=NEAR, sharding=(WORLD,), sizes=(2, 2, 4)),
    Layout("ep", foreign=NEAR, sharding=(WORLD,), sizes=(2, 4, 4), experts=FAR),
    Layout("pp", foreign=FAR, sharding=NEAR),
)


def _of_rank(groups: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in groups if rank in ranks)


class _Foreign:
    """What Megatron communicates on `rank`, in the current stream or on a side stream."""

    def __init__(self, layout: Layout, rank: int, device: CommandLog):
        self.layout, self.device = layout, device
        self.group = Group(layout.name, _of_rank(layout.foreign, rank))
        self.stage = self.group.ranks.index(rank)
        self._data = torch.ones(4)

    def in_unit(self, unit: HZPUnit) -> None:
        """Within the forward or the backward of `unit`."""
        if self.layout.name == "tp":
            self._run("attention")
            self._run("mlp")
        elif self.layout.name == "cp":
            with self.device.on_stream(_CP_STREAM):
                self._run("keys and values")
        elif self.layout.name == "ep" and unit.name.endswith("experts"):
            self._run("dispatch")
            self._run("combine")

    def exchange(self) -> None:
        """Between two pipeline stages."""
        self._run("send and receive")

    def norm(self) -> None:
        """The norm of the gradients, over the world."""
        dist.all_reduce(self._data, group=Group("norm", WORLD), async_op=True).wait()

    def _run(self, operation: str) -> None:
        self.device.collective(operation, self.group, self._data).wait()


class _LayoutRunner(Runner):
    """A step whose backward runs on a thread of its own, as autograd's does on a device.

    A pipeline of two stages runs 1F1B: each stage sends one way and receives the other at once.

        stage 0   F0 x F1 x B0 F2 x B1 x B2
        stage 1      x F0 B0 x F1 B1 x F2 B2 x
    """

    def __init__(self, scheduler: StepScheduler, step: Step, foreign: _Foreign):
        super().__init__(scheduler, step)
        self._foreign, self._stage = foreign, foreign.stage
        self._is_pipeline = foreign.layout.name == "pp"
        self._is_first = True

    def _forward(self) -> None:
        if self._is_pipeline and self._stage == 1 and self._is_first:
            self._foreign.exchange()
        self._is_first = False
        super()._forward()
        if self._is_pipeline and self._stage == 0:
            self._foreign.exchange()

    def _compute(self, unit: HZPUnit) -> None:
        super()._compute(unit)
        self._foreign.in_unit(unit)

    def _backward(self, units: list[HZPUnit]) -> None:
        if self._is_pipeline and self._stage == 0 and self.scheduler.is_last_micro_batch:
            self._foreign.exchange()
        run = torch.no_grad()(super()._backward)
        self._foreign.device.run_on_thread(lambda: run(units))
        if self._is_pipeline and self._stage == 1:
            self._foreign.exchange()

    def _optimizer_step(self) -> None:
        self._foreign.norm()
        super()._optimizer_step()


def _new_units(layout: Layout, rank: int) -> list[HZPUnit]:
    """Layers of one unit, or of two with experts."""
    dense = recorded_groups(layout.sizes, rank, _of_rank(layout.sharding, rank))
    units = []
    for layer in range(LAYERS):
        units.append(new_unit(f"layer {layer}", UnitShape(), dense))
        if layout.experts:
            experts = recorded_groups((2, 2, 2), rank, _of_rank(layout.experts, rank))
            units.append(new_unit(f"layer {layer} experts", UnitShape(40), experts))
    return units


def log_rank(layout: Layout, rank: int, config: ScheduleConfig, seed: int) -> list[Command]:
    """What the host of `rank` puts into streams in some steps; its threads, the one that computes
    included, pause at random."""
    dice = random.Random(f"{seed} {rank}")
    pause = lambda: dice.random() * LONGEST_PAUSE_S if dice.random() < PAUSES else 0.0  # noqa: E731
    device = CommandLog(pause)
    with device.recording(), torch.no_grad():
        foreign = _Foreign(layout, rank, device)
        driver = delayed_driver(device, config, dice.randrange(10**9))
        try:
            scheduler = StepScheduler(_new_units(layout, rank), config, driver, 0.5)
            warm_up = 1 if layout.name == "pp" and foreign.stage == 0 else 0
            for _ in range(STEPS):
                step = Step(MICRO_BATCHES, warm_up=warm_up)
                _LayoutRunner(scheduler, step, foreign).run()
            scheduler.settle()
        finally:
            driver.close()
    return device.commands


def log_ranks(layout: Layout, config: ScheduleConfig, seed: int) -> dict[int, list[Command]]:
    """`log_rank` of every rank."""
    return {rank: log_rank(layout, rank, config, seed) for rank in WORLD}


def order_of(commands: list[Command]) -> list[tuple]:
    """The collectives of a rank, ours and foreign, as any rank with the same program sees them:
    a group is how many ranks it has and how far apart they are."""
    return [
        (launch.operation, launch.group.purpose, len(ranks), ranks[1] - ranks[0], launch.numel)
        for launch in commands
        if isinstance(launch, Launch)
        for ranks in (launch.group.ranks,)
    ]
