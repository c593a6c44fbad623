# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where the host runs ahead of a device, the first write to a unit is the one that is named, once
the step has ended."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.early_update import EarlySends
from megatron_asynchzp.engine.zero.sent_check import SentCheck
from megatron_asynchzp.errors import ConfigurationError

BETWEEN, IN_USE = "u1: the values of the optimizer's parameters", "u1: its parameters were written"


class AheadDevice(CpuDevice):
    """A CPU whose answers are read a step later, as those of a device."""

    runs_ahead = True


def new_unit(name: str, is_written: bool) -> Any:
    """A trained unit that is in use, whose parameters were written to or not."""

    def was_written() -> torch.Tensor:
        return torch.tensor(is_written)

    record = mock.Mock(was_written=was_written, was_written_in_use=was_written)
    unit = mock.Mock(sent_record=record, device=torch.device("cpu"), is_main_param_away=False)
    unit.name = name
    unit.groups.topology.world_size = 2
    return unit


def check_after(uses: list[str]) -> SentCheck:
    """A comparison after these uses of its second unit: each finds nothing, or a write."""
    driver = start_driver(ScheduleConfig("inline"), AheadDevice())
    units = [new_unit("u0", False), new_unit("u1", True), new_unit("u2", True)]
    check = SentCheck(units, driver, (), EarlySends(), lambda unit: None)
    check.enable_write_checks(lambda: None)
    for use in uses:
        if use == "between":
            check.check_unwritten(units[1])
        elif use == "in use":
            check.check_unwritten_in_use(units[1])
        else:
            check.check_unwritten(units[0])
            check.check_unwritten_in_use(units[0])
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


def test_a_write_of_the_last_step_is_named_before_anything_is_saved():
    with pytest.raises(ConfigurationError, match="u1: the values of the optimizer's parameters"):
        check_after(["between"]).settle()
