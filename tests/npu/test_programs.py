# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""On emulated NPUs what the programs of the emulated device train: schedules, budgets, parts not
used, checkpoints, bf16 on the wire, updates sent early, chunks, sleep; and what notices a fault."""

import pytest
import torch.distributed as dist

from scripts.testbed.device.delays import Delays
from scripts.testbed.ranks import run_ranks
from tests.device.programs import Seen
from tests.device.test_faults import A_HANDFUL, RECOMPUTATION
from tests.device.test_sleep import CYCLES, train
from tests.mutants.device_programs import PROGRAMS
from tests.mutants.on_device import Runner
from tests.npu.conftest import StartScriptWorlds

LAWS = [Delays(), Delays("uniform", 1), Delays("slow-stream", 2), Delays("on-demand", 3)]


def train_all(laws: list[Delays]) -> list[list[Seen]]:
    """Every program under each law."""
    from scripts.testbed.device import inside

    results = []
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        results.append([program.train() for program in PROGRAMS])
    return results


@pytest.mark.slow
def test_no_delay_changes_a_bit_of_any_program(by_start_script: StartScriptWorlds):
    without, *others = by_start_script.run(train_all, 2, LAWS, timeout_s=500)[0]
    for law, seen in zip(LAWS[1:], others, strict=True):
        for program, found, expected in zip(PROGRAMS, seen, without, strict=True):
            assert found == expected, (program.name, str(law))


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


@pytest.mark.slow
def test_a_fault_of_the_npu_path_is_noticed_by_whom_cudas_is(by_start_script: StartScriptWorlds):
    runner = Runner(by_start_script, [RECOMPUTATION])  # pyright: ignore[reportArgumentType]
    for one in runner.try_all(A_HANDFUL):
        assert one.by in A_HANDFUL[one.fault], one
