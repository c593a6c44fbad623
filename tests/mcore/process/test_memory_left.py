# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""--asynchzp-keep-params-gb auto: what a device has left, asked once, after the first update, and
where it cannot be asked. That all ranks then keep the same is in tests/zero/test_staying.py.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_asynchzp.engine.device import CpuDevice, StreamDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.step.communication import Communication

AUTO = ScheduleConfig("inline", keeps_params_in_free_memory=True)


@pytest.mark.parametrize("free, left", [(60, 52), (8, 0), (3, 0)])
def test_what_a_device_has_left_is_what_is_free_less_a_tenth_of_its_memory(free, left):
    asked = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return free, 80

    device = torch.device("cuda", 3)
    assert StreamDevice(SimpleNamespace(mem_get_info=mem_get_info), device).left_nbytes() == left
    assert asked == [device]


def test_a_cpu_cannot_tell_and_the_run_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match=r"^--asynchzp-keep-params-gb auto: .* give GiB$"):
        Communication(AUTO, CpuDevice())
