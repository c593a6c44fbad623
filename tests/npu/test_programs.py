# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""On emulated NPUs what the programs of the emulated device train: schedules, budgets, parts not
used, checkpoints, bf16 on the wire, updates sent early, chunks, sleep."""

import pytest

from scripts.testbed.ranks import run_ranks
from tests.device.test_sleep import CYCLES, train
from tests.device.varied_programs import LAWS, assert_no_delay_changes_a_bit, train_each_under
from tests.npu.conftest import StartScriptWorlds


@pytest.mark.slow
def test_no_delay_changes_a_bit_of_any_program(by_start_script: StartScriptWorlds):
    found = by_start_script.run(train_each_under, 2, LAWS, timeout_s=500)
    assert_no_delay_changes_a_bit(found[0])


@pytest.mark.slow
def test_asleep_nothing_is_left_on_an_npu_and_ten_times_nothing_grows(
    by_start_script: StartScriptWorlds,
):
    expected = [seen for seen, _, _ in run_ranks(train, 2, False)]
    for rank, (seen, asleep, awake) in enumerate(by_start_script.run(train, 2, True)):
        for ours, theirs in zip(seen, expected[rank], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)  # bf16
        assert asleep == [0] * CYCLES
        assert len(set(awake[1:])) == 1 and awake[1] > 0
