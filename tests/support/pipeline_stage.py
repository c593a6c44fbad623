# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a pipeline on a recording device: the schedulers of its model chunks, without model,
autograd or other ranks.
"""

from collections import Counter

import torch

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.engine.zero.step import KeepBudgets, StepScheduler
from tests.support.engine import on_submit
from tests.support.pipeline_order import Stage, Use
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import UnitShape, delayed_driver, new_unit, recorded_groups

SIZES = (2, 4, 8)


class PipelineStage:
    """The chunks of one rank, whose schedulers run what a Stage says.

    rooms: for so many units there is memory to keep parameters, and gradients; numel: of a unit;
    marks_last: whether the last micro-batch is known to be it while it runs. submitted: (lane,
    unit) of each step.
    """

    def __init__(
        self,
        stage: Stage,
        rooms: tuple[int, int],
        device: RecordingDevice,
        depth: int = 0,
        numel: int = 64,
        marks_last: bool = True,
        in_flight_nbytes: int | None = None,
    ):
        self.marks_last = marks_last
        self.stage, groups = stage, recorded_groups(SIZES, 0)
        shape = UnitShape(numel)
        self.padded = new_unit("u", shape, groups).layout.padded_numel
        self.config = ScheduleConfig(
            "main-thread",
            prefetch_depth=depth,
            in_flight_nbytes=in_flight_nbytes,
            keep_params_nbytes=rooms[0] * 2 * self.padded,
            keep_grads_nbytes=rooms[1] * FP32_NBYTES * self.padded,
        )
        self.driver = delayed_driver(device, self.config, 0)
        self.submitted: list[list[tuple[str, str]]] = [[]]
        on_submit(self.driver, lambda task: self.submitted[-1].append((task.lane, task.unit)))
        self.budgets = KeepBudgets.of(self.config, self.driver)
        self.chunks = [
            StepScheduler(
                [new_unit(f"{chunk}.{layer}", shape, groups) for layer in range(stage.layers)],
                self.config,
                self.driver,
                budgets=self.budgets,
            )
            for chunk in range(stage.vpp)
        ]

    def count(self, lane: str, step: int) -> int:
        """Tasks of a step, counted from 1. The next step's first gathers follow the optimizer."""
        return sum(one == lane for one, _ in self.submitted[step - 1])

    def run_step(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grads()
        left = Counter(self.stage.grad_uses())
        for phase, use in self.stage.turns():
            self._run_turn(phase, use, left)
        for chunk in self.chunks:
            chunk.sync_grads()
        self.submitted.append([])
        for chunk in self.chunks:
            chunk.sync_params()

    def _run_turn(self, phase: str, use: Use, left: Counter[Use]) -> None:
        chunk = self.chunks[use[0]]
        unit = chunk.units[use[1]]
        chunk.gathers.unshard(unit)
        for param in unit.params:
            param.sum()
        chunk.gathers.reshard(unit)
        if phase == "B":
            for param in unit.params:
                param.grad = torch.ones(param.shape, dtype=param.dtype)
            left[use] -= 1
            chunk.is_last_micro_batch = self.marks_last and left[use] == 0
            chunk.reduce(unit)

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.settle()
        self.driver.close()


def executed(device: RecordingDevice, *args, steps: int = 3, **options) -> PipelineStage:
    """A stage, as its constructor takes it, after so many steps."""
    with device.recording(), torch.no_grad():
        done = PipelineStage(*args, device, **options)
        for _ in range(steps):
            done.run_step()
        done.close()
    return done
