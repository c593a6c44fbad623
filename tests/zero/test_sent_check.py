# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where the host runs ahead of a device, the first write to a unit is the one that is named, once
the step has ended."""

from typing import Any

import pytest
import torch

from megatron_asynchzp.comm.schedules import start_driver
from megatron_asynchzp.device import CpuDevice
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.zero.sent_check import SentCheck

BETWEEN, IN_USE = "u1: the values of the optimizer's parameters", "u1: its parameters were written"


class AheadDevice(CpuDevice):
    """A CPU whose answers are read a step later, as those of a device."""

    runs_ahead = True


class Unit:
    """Its parameters were written to, or not."""

    def __init__(self, name: str, is_written: bool):
        self.name, self.device, self._is_written = name, torch.device("cpu"), is_written

    def was_written(self) -> torch.Tensor:
        return torch.tensor(self._is_written)

    was_written_in_use = was_written


def check_after(uses: list[str]) -> SentCheck:
    """A comparison after these uses of its second unit: each finds nothing, or a write."""
    driver = start_driver(ScheduleConfig("inline"), AheadDevice())
    units: list[Any] = [Unit("u0", False), Unit("u1", True), Unit("u2", True)]
    check = SentCheck(units, driver, ())
    for use in uses:
        if use == "between":
            check.refuse_write(units[1])
        elif use == "in use":
            check.refuse_write_in_use(units[1])
        else:
            check.refuse_write(units[0])
            check.refuse_write_in_use(units[0])
    return check


@pytest.mark.parametrize(
    ("uses", "named"),
    [
        (["between"], BETWEEN),
        (["in use"], IN_USE),
        (["between", "in use"], BETWEEN),
        (["in use", "between"], IN_USE),
        (["between", "between"], BETWEEN),
        (["nothing", "between", "nothing", "in use", "between"], BETWEEN),
        (["nothing", "nothing"], None),
    ],
    ids=str,
)
def test_of_two_uses_that_find_a_write_the_first_is_named(uses, named):
    check = check_after(uses)
    check.send_answers()  # the step ends: the answer travels
    if named is None:
        check.settle()
        return
    with pytest.raises(ConfigurationError) as refused:
        check.send_answers()
    assert str(refused.value).startswith(named)
