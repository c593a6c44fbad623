# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Copies of optimizer states to and from the host are ordered, whichever units a step updates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_asynchzp.engine.at_rest.host_states import HostStates
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.contenders.adam import owned_params
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import UnitShape, new_unit, recorded_groups

# Of each step, the units that get gradients.
IN_TURNS = [(0, 1), (1,), (1, 2), (2,), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("numels", [(24, 24, 24), (24, 600, 40)])
@pytest.mark.parametrize("steps", [IN_TURNS, IN_TURNS[::-1], [(0, 1, 2)] * 3], ids=str)
def test_a_step_that_updates_other_units_than_the_one_before_reads_what_that_one_stored(
    steps: list[tuple[int, ...]], numels: tuple[int, ...]
):
    device: Any = RecordingDevice()
    driver = start_driver(ScheduleConfig("main-thread"), device)
    groups = recorded_groups((1, 2, 2), rank=1)
    with device.recording():
        units = [new_unit(f"u{i}", UnitShape(numel), groups) for i, numel in enumerate(numels)]
        for unit in units:
            unit.hold_on_host(device.new_host_memory((unit.optim_range.numel,), torch.float32))
        params_of = {unit: owned_params(unit) for unit in units}
        params = [param for params in params_of.values() for param in params if param.numel()]
        optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
        scheduler: Any = SimpleNamespace(driver=driver, units=units)
        states = HostStates([scheduler], optimizer, params_of)
        for step in steps:
            for index in step:
                for param in params_of[units[index]]:
                    param.grad = torch.ones_like(param)
            states.update()
        states.settle()
        for unit in units:  # the host may read them now
            unit.main_param.storage.sum()
    driver.close()
    assert device.races == []
    assert device.num_accesses > 20 * len(steps)
