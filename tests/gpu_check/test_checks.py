# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks themselves, on a CPU: right engines pass, and faults put into the engine are found."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_asynchzp.comm.driver import Task
from megatron_asynchzp.device import StreamDevice
from scripts.gpu_check import (
    endless,
    loopback,
    loopback_world,
    megatron_runs,
    memory,
    model_parallel,
    parity,
    pretrain,
)
from scripts.gpu_check.loopback import Case, first_difference, train_both
from scripts.gpu_check.outcome import CheckFailed, Place
from tests.support.live_memory import new_objects_only

CPU = torch.device("cpu")
SHAPES = loopback.variants(is_cuda=False)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place("cpu", 0, tmp_path)


# ---- loopback


def test_the_loopback_world_trains_as_a_plain_process():
    every = list(loopback.cases(list(SHAPES)))
    chosen = [(case, SHAPES[case.variant]) for case in every[::5]]
    assert {case.schedule for case, _ in chosen} == set(loopback.ON_STREAMS)
    assert {case.sizes for case, _ in chosen} == set(loopback.SIZES)
    assert loopback.run_cases(chosen, CPU)["cases"] == len(chosen) > 6


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


@contextmanager
def inert_cuda() -> Iterator[mock.MagicMock]:
    """torch.cuda's streams and events without a device: what is put into a stream happens at once.
    Shows that the code which uses them runs, not its timing; yields what was called."""
    calls = mock.MagicMock()
    device = StreamDevice(torch.cuda, torch.device("cuda", 0))
    device.new_host_memory = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    names = ("Stream", "Event", "current_stream", "stream", "set_device", "_sleep")
    with ExitStack() as stack:
        patch, of_step = mock.patch, "megatron_asynchzp.zero.step.device_of"
        stack.enter_context(patch.multiple(torch.cuda, **{n: getattr(calls, n) for n in names}))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *_: None))
        stack.enter_context(patch(of_step, lambda _: device))
        stack.enter_context(patch("scripts.gpu_check.poison.device_of", lambda _: device))
        stack.enter_context(patch.object(loopback_world, "new_lane", loopback_world._StreamLane))
        yield calls


@pytest.mark.parametrize("schedule", loopback.ON_STREAMS)
def test_collectives_on_streams_and_late_gradients_train_as_a_plain_process(schedule):
    shape = replace(SHAPES["plain"], has_side_stream=True, late_s=0.01)
    case = Case("side stream", (2, 4, 8), schedule, 1)
    with inert_cuda() as calls:
        assert loopback.run_cases([(case, shape)], CPU)["cases"] == 1
    assert calls._sleep.call_count > 50  # before each collective, and in each late backward
    assert calls.current_stream().wait_event.call_count > 50
    assert calls.Event().record.call_count > 50


# ---- memory, endless


def test_memory_that_a_step_leaves_behind_is_found(place):
    kept: list[torch.Tensor] = []
    step = memory.LoopbackTrainer.step

    def leaking_step(self, batches):
        kept.append(torch.zeros(3))
        return step(self, batches)

    with new_objects_only():
        assert memory.run(place, 12, 5, ["inline"])
        with mock.patch.object(memory.LoopbackTrainer, "step", leaking_step):
            with pytest.raises(CheckFailed, match="inline, steps: tensors by 10"):
                memory.run(place, 12, 4, ["inline"])


def test_an_endless_collective_is_one_line(place):
    figures = endless.run(place, ["threaded"])
    assert "failed: not finished after 3 s" in figures["threaded"]


# ---- Megatron


@pytest.mark.slow
def test_pretrain_on_one_rank_is_stocks_saves_and_resumes(place):
    with mock.patch.dict(pretrain.MOST_RATIO, cpu=float("inf")):
        figures = pretrain.run(place)
    assert figures["losses apart"] <= pretrain.LOSS_TOLERANCE


@pytest.mark.slow
def test_two_ranks_train_as_stock_ddp(place):
    figures = parity.run(place, 2)
    assert len(figures) == 2


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_runs_with_late_launches_end(place):
    for way in model_parallel.WAYS:
        flags = {way: model_parallel.WAYS[way]}
        assert model_parallel.run(place, flags, connections=(8,), steps=4)


def test_series_are_equal_within_a_limit_or_the_check_fails():
    assert megatron_runs.require_equal("loss", [1.0, 2.0], [1.0, 2.000001], 1e-5) < 1e-5
    for ours, stock in [([1.0], [1.1]), ([], []), ([1.0], [1.0, 2.0]), ([float("nan")], [1.0])]:
        with pytest.raises(CheckFailed, match="loss"):
            megatron_runs.require_equal("loss", ours, stock, 1e-5)
