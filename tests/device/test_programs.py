# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""On the emulated device nothing that varied programs do is left to chance: the watch is told of no
access that nothing orders, and no delay changes a bit."""

import pytest

from scripts.testbed.device.worlds import DeviceWorlds
from tests.device.varied_programs import LAWS, assert_no_delay_changes_a_bit, train_each_under


@pytest.mark.slow
def test_no_delay_changes_a_bit_of_any_program(worlds: DeviceWorlds):
    found = worlds.run(train_each_under, 2, LAWS, timeout_s=500)
    assert_no_delay_changes_a_bit(found[0])
