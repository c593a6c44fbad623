# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine on emulated NPUs: torch_npu's own allocator, task queue, streams and HCCL groups,
kernels put off by every law of delay."""

from pathlib import Path

import pytest

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import Case, Seen, train_engine, train_engine_each, train_engine_under
from tests.device.test_engine import EACH_LAW, FOUR, PAIR
from tests.support.selection import slow_unless


def seeds_of(law: str) -> list[Delays]:
    return [Delays(law, seed) for seed in range(20)]


@pytest.mark.parametrize(
    ("world_size", "cases", "laws"),
    [
        slow_unless(True, 2, PAIR[:1], [Delays("uniform", 1)], id="2 ranks, one law"),
        slow_unless(False, 2, PAIR, EACH_LAW, id="2 ranks, each law"),
        slow_unless(False, 4, FOUR, EACH_LAW, id="4 ranks, each law"),
        *(
            slow_unless(False, size, cases, seeds_of(law), id=f"{size} ranks, {law}")
            for size, cases in ((2, PAIR), (4, FOUR))
            for law in LAWS[1:]
        ),
    ],
)
def test_on_npus_no_delay_changes_a_bit_and_the_digits_are_gloos(
    npu_worlds: DeviceWorlds, world_size: int, cases: list[Case], laws: list[Delays]
):
    close = dict(zip(cases, run_ranks(train_engine_each, world_size, cases)[0]))
    laws = [Delays(), *laws]
    ranks = npu_worlds.run(train_engine_under, world_size, cases, laws, timeout_s=60 * len(laws))
    first = {run.case: run.seen for run in ranks[0][: len(cases)]}
    assert len(ranks[0]) == len(cases) * len(laws)
    for run in ranks[0]:
        assert run.seen == first[run.case], (run.case, str(run.delays))
        assert run.waited == {}
        for ours, theirs in zip(run.seen, close[run.case], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def train_and_name_threads(case: Case) -> tuple[Seen, set[str]]:
    seen = train_engine(case)
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    return seen, names


@pytest.mark.slow
def test_in_every_mode_of_torch_npus_task_queue_a_run_has_the_same_bits(npu_worlds: DeviceWorlds):
    """In mode 0 the thread that asks makes the launch; 1 and 2 have a thread for it."""
    found = {}
    for mode in ("0", "1", "2"):
        env = {"TASK_QUEUE_ENABLE": mode}
        delays = Delays("uniform", 1)
        found[mode] = npu_worlds.run(train_and_name_threads, 2, PAIR[0], delays=delays, env=env)[0]
    for mode, (seen, names) in found.items():
        assert seen == found["0"][0]
        assert ("acl_thread" in names) == (mode != "0"), mode
