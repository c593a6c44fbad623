# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks themselves, on a CPU: right engines pass, and faults put into the engine are found."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron_asynchzp.engine.comm.task import Task
from scripts.gpu_check import endless, loopback, megatron_runs, memory, registered
from scripts.gpu_check.loopback import Case, first_difference, train_both
from scripts.gpu_check.outcome import CheckFailed, Target

CPU = torch.device("cpu")
SHAPES = loopback.variants(is_large=False)


@pytest.fixture
def target(tmp_path) -> Target:
    return Target("cpu", 0, tmp_path)


# ---- loopback


def test_the_loopback_world_trains_as_a_plain_process():
    every = list(loopback.cases(list(SHAPES)))
    chosen = [(case, SHAPES[case.variant]) for case in every[::15]]
    assert {case.schedule for case, _ in chosen} == set(loopback.ON_STREAMS)
    assert {case.sizes for case, _ in chosen} == set(loopback.SIZES)
    assert loopback.run_cases(chosen, CPU)["cases"] == len(chosen) == 4


def difference(schedule: str) -> str | None:
    case = Case("plain", (2, 4, 8), schedule, 1)
    return first_difference(train_both(case, SHAPES["plain"], CPU, rank=5))


@pytest.mark.parametrize("lane", ["gather", "reduce"])
def test_a_wait_that_is_left_out_is_found(lane):
    wait = Task.wait

    def wait_unless_left_out(task: Task) -> None:
        if task.lane != lane:
            wait(task)

    with mock.patch.object(Task, "wait", wait_unless_left_out):
        assert difference("threaded") is not None
    assert difference("threaded") is None


# ---- memory, endless


def test_memory_that_a_step_leaves_behind_is_found(target):
    kept: list[torch.Tensor] = []
    step = memory.LoopbackTrainer.step

    def leaking_step(self, batches):
        kept.append(torch.zeros(3))
        return step(self, batches)

    assert memory.run(target, 12, 5, ["inline"])
    with mock.patch.object(memory.LoopbackTrainer, "step", leaking_step):
        with pytest.raises(CheckFailed, match="inline, steps: tensors by 10"):
            memory.run(target, 12, 4, ["inline"])


def test_an_endless_collective_is_one_line(target):
    figures = endless.run(target, ["threaded"])
    assert "failed: not finished after 3 s" in figures["threaded"]


# ---- Megatron


def test_series_are_equal_within_a_limit_or_the_check_fails():
    assert megatron_runs.require_equal("loss", [1.0, 2.0], [1.0, 2.000001], 1e-5) < 1e-5
    ends_broken = ([1.0, float("nan")], [1.0, 1.0])
    for ours, stock in [([1.0], [1.1]), ([], []), ([1.0], [1.0, 2.0]), ends_broken]:
        with pytest.raises(CheckFailed, match="loss"):
            megatron_runs.require_equal("loss", ours, stock, 1e-5)


_RUN = {
    "losses": [2.0, 1.5],
    "step_s": 0.5,
    "wake_s": 0.1,
    "kernels": [],
    "asleep": [4096, 4096],
    "lines": [],
}
_WINDOWS = {"lines": ["G of ranks 0 to 1: NCCL gave a window"]}


@pytest.mark.parametrize(
    "changed, replays, reason",
    [
        ({}, True, ""),
        ({"kernels": ["ncclSymkDevKernel_AllGather"]}, True, ""),
        ({"losses": [2.0, 1.5001]}, True, "apart"),
        ({"lines": []}, True, "not every group has a window"),
        ({"lines": ["G of ranks 0 to 1: NCCL gave no window"]}, True, "not every group"),
        ({"kernels": ["ncclDevKernel_AllGather_RING_LL"]}, True, "no kernel is called ncclSymk"),
        ({"asleep": [4096, 8192]}, True, "reserved bytes asleep change"),
        ({}, False, "brings other values"),
    ],
)
def test_registered_memory_is_judged_by_windows_kernels_losses_sleeps_and_replays(
    changed, replays, reason
):
    record = {"plain": _RUN, "registered": _RUN | _WINDOWS | changed, "replays": replays}
    with pytest.raises(CheckFailed, match=reason) if reason else nullcontext():
        registered.judge(record)
