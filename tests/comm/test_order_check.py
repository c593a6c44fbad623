# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""When the comparison of orders is answered on a device: a step later, without holding the host,
and before anything that follows the last step."""

from unittest import mock

import pytest
import torch

from megatron_asynchzp.engine.comm.order_check import OrderCheck, OrderMismatch
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import Program, Step, UnitShape, execute


class HostIsHeld(RecordingDevice):
    """waits: for each event that the host waits for, whether it is of the step that runs."""

    def __init__(self):
        super().__init__()
        self.step_of: dict[int, int] = {}
        self.waits: list[bool] = []
        self.driver = None

    def attend(self, driver) -> None:
        self.driver = driver

    def record_event(self):
        event = super().record_event()
        if self.driver is not None:
            self.step_of[id(event)] = self.driver.step
        return event

    def synchronize(self, event, limit_s: float, *_) -> bool:
        assert self.driver is not None
        self.waits.append(self.step_of[id(event)] == self.driver.step)
        return super().synchronize(event, limit_s)


def test_no_step_holds_the_host_for_its_own_comparison_but_the_last_is_read_at_the_end():
    done = execute(Program((UnitShape(),) * 2, (Step(),) * 4), new_device=HostIsHeld)
    assert done.device.waits == [False, False, False, True]  # the fourth: `settle`


def differing(self, tensor, op=None, group=None, async_op=False):
    """An all-reduce among ranks of which one issued something else."""
    tensor[0] += tensor.dtype == torch.int64
    return self._issue("all-reduce", group, tensor, tensor)


def test_what_finds_the_first_difference_keeps_its_memory_until_it_was_used():
    devices = []

    class Remembered(RecordingDevice):
        def __init__(self):
            super().__init__()
            devices.append(self)

        _all_reduce = differing

        def _all_gather(self, full, shard, group, async_op):
            full.copy_(shard.repeat(full.numel() // shard.numel()))
            return super()._all_gather(full, shard, group, async_op)

    with (
        mock.patch("torch.distributed.get_rank", lambda: 3),
        pytest.raises(OrderMismatch, match="collective 0 since the last comparison"),
    ):
        execute(Program((UnitShape(),) * 2, (Step(),), sizes=(2, 4, 8)), new_device=Remembered)
    assert devices[0].races == []


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_difference_is_raised_on_a_device_too_and_not_lost_at_the_end(num_steps):
    with (
        mock.patch.object(RecordingDevice, "_all_reduce", differing),
        mock.patch.object(OrderCheck, "_describe_difference", lambda _: "differs"),
        pytest.raises(OrderMismatch, match="step 1: differs"),
    ):
        execute(Program((UnitShape(),) * 2, (Step(),) * num_steps))
