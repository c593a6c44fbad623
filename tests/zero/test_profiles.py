# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A trace of torch's profiler shows what the engine does, by unit."""

import pytest
import torch

from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, on_submit


def ranges_and_tasks(kind: str) -> tuple[list[str], list[str]]:
    """The ranges of a step in the profile, and what was submitted in it."""
    schedule = ScheduleConfig(kind, checks_order=False)
    trainer = EngineTrainer(build_toy(), (2, 2, 2), schedule=schedule)
    trainer.local_step(0, 1)
    submitted: list[str] = []
    on_submit(trainer.runtime.driver, lambda task: submitted.append(task.name))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.local_step(1, 2)
        trainer.runtime.settle()
    trainer.runtime.close()
    names = [event.name for event in profile.events() if event.name.startswith("asynchzp: ")]
    return [name.removeprefix("asynchzp: ") for name in names], submitted


@pytest.mark.parametrize("kind", ["inline", "main-thread"])
def test_each_collective_of_a_step_has_a_range_with_its_operation_and_unit(kind):
    for ranges, submitted in run_ranks(ranges_and_tasks, 2, kind):
        issued = [name for name in ranges if not name.startswith("wait for ")]
        assert sorted(issued) == sorted(submitted)
        assert {"gather", "reduce", "grad-sync", "param-sync"} == {n.split()[0] for n in issued}
