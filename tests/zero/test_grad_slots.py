# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The ring of gradient slots where more units of a size collect gradients than it has slots."""

import pytest
import torch

from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.step import StepScheduler
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import UnitShape, new_unit, recorded_groups


@pytest.mark.parametrize("kind", ["inline", "main-thread", "threaded"])
def test_a_unit_that_collects_gradients_to_the_end_of_backward_leaves_others_a_slot(kind):
    device, config = RecordingDevice(), ScheduleConfig(kind, grad_slots=1)
    with device.recording(), torch.no_grad():
        driver = config.start_driver(device)
        groups = recorded_groups((2, 4, 8), rank=0)
        units = [new_unit(name, UnitShape(), groups) for name in ("root", "layer 0", "layer 1")]
        scheduler = StepScheduler(units, config, driver)
        for _ in range(2):
            scheduler.zero_grads()
            for unit in units:  # the root's norm comes first in backward and is reduced last
                for index, param in enumerate(unit.params):
                    param.grad = torch.ones(param.shape, dtype=param.dtype)
                    scheduler.reductions.take(unit, (index,))
                if unit is not units[0]:
                    scheduler.reduce(unit)
            scheduler.reduce(units[0])
            scheduler.sync_grads()
        num_slots = len(list(scheduler.reductions.rings.slots))
        scheduler.settle()
        driver.close()
    assert num_slots == 2
    assert device.races == []
