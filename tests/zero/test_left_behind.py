# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What forwards without a backward leave behind: nothing, neither tensors nor records."""

import gc
import time
from operator import gt

import pytest
import torch
from torch import nn

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import Span
from megatron_asynchzp.engine.schedule import ON_STREAMS, ScheduleConfig
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import recorded_groups

_WIDTH = 64
LIMIT_S = 30.0


class Squashed(nn.Module):
    """Its activation is saved by the node that makes it: the node's own output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).sigmoid()


class Engine:
    """Four units on a device that runs ahead, without ranks."""

    def __init__(self, kind: str):
        self.model = nn.Sequential(*(Squashed() for _ in range(4)))
        config = ScheduleConfig(kind, 1, time_limit_s=LIMIT_S, checks_order=False, timed_every=1)
        self.driver = start_driver(config, RecordingDevice())
        groups = {"dense": recorded_groups((2, 4, 8), 3)}
        plans = plan_units(self.model, list(self.model))
        self.runtime = HZPRuntime(self.model, plans, groups, config, self.driver)

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(8, _WIDTH))

    def train(self) -> None:
        self.runtime.zero_grads()
        self.forward().sum().backward()
        self.runtime.sync_grads()
        self.runtime.sync_params()

    def close(self) -> None:
        self.runtime.close()
        self.driver.close()


def live(kind: type) -> int:
    # By type: a proxy of something that is gone has no class of its own to ask for.
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


def left_behind() -> tuple[int, int, int]:
    gc.collect()
    return live(Span), live(Task), live(torch.Tensor)


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_graphs_that_no_backward_goes_through_are_freed_without_the_collector(kind):
    engine = Engine(kind)
    with engine.driver.device.recording():
        engine.train()
        engine.forward()
        gc.collect()
        gc.disable()
        try:
            before = live(torch.Tensor)
            for _ in range(20):
                engine.forward()
            assert live(torch.Tensor) <= before
        finally:
            gc.enable()
        engine.close()


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_forty_evaluations_leave_no_more_behind_than_two(kind):
    engine = Engine(kind)
    with engine.driver.device.recording(), torch.no_grad():
        with torch.enable_grad():
            engine.train()
        for number in range(1, 41):
            engine.forward()
            if number == 2:
                few = left_behind()
        # The thread that holds the time limit lets tasks go when it looks the next time.
        deadline = time.monotonic() + 10
        while any(map(gt, left_behind(), few)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(gt, left_behind(), few)), (few, left_behind())
        engine.close()
