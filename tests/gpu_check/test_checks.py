# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks themselves, on a CPU: right engines pass, and faults put into the engine are found."""

from functools import partial
from unittest import mock

import pytest
import torch

from megatron_asynchzp.comm.driver import Task
from megatron_asynchzp.zero.unit import HZPUnit
from scripts.gpu_check import (
    endless,
    host_time,
    loopback,
    megatron_runs,
    memory,
    model_parallel,
    parity,
    pretrain,
)
from scripts.gpu_check.loopback import Case, first_difference, train_both
from scripts.gpu_check.outcome import CheckFailed, Place
from scripts.gpu_check.process import Ended
from scripts.testbed.megatron_flags import size_flags
from tests.support.new_objects import new_objects_only

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


def never_waits(lane: str):
    wait = Task.wait
    return mock.patch.object(Task, "wait", lambda task: None if task.lane == lane else wait(task))


def forgets_the_sync():
    """A gather that does not wait for the parameter shard to be rebuilt."""
    return mock.patch.object(Task, "__init__", forgetful_init)


_INIT = Task.__init__


def forgetful_init(self, lane, unit, axes, start, ready=(), after=()):
    _INIT(self, lane, unit, axes, start, ready, () if lane == "gather" else after)


def doubles_the_gradient():
    scale = HZPUnit.sync_grad_steps
    return mock.patch.object(
        HZPUnit, "sync_grad_steps", lambda unit, factor: scale(unit, 2 * factor)
    )


FAULTS = {
    "computation does not wait for a gather": partial(never_waits, "gather"),
    "a gather does not wait for its shard": forgets_the_sync,
    "a slot is free before its reduction": partial(never_waits, "reduce"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wait_that_is_left_out_is_found(fault):
    with fault():
        assert difference("threaded") is not None
    assert difference("threaded") is None


def test_a_wrong_factor_is_found_in_the_gradients():
    with doubles_the_gradient():
        assert difference("inline").startswith("the gradients of ")


# ---- memory, host time, endless


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


def test_host_time_is_measured_per_unit_and_traced(place):
    figures = host_time.run(place, rounds=1)
    assert set(figures) == {"plain process", *host_time.ON_STREAMS}
    for schedule in host_time.ON_STREAMS:
        assert (place.folder / f"trace_{schedule}.json").stat().st_size > 1000
    with mock.patch.dict(host_time.LIMIT_US, cpu=-1e9), pytest.raises(CheckFailed, match="inline"):
        host_time.run(place, rounds=1)


def test_idle_time_is_what_no_kernel_covers():
    assert host_time.covered([(0.0, 4.0), (1.0, 2.0), (6.0, 7.0), (6.5, 10.0)]) == (10.0, 8.0)
    assert host_time.covered([]) == (0.0, 0.0)


def test_an_endless_collective_is_one_line(place):
    figures = endless.run(place, ["threaded"])
    assert "failed: not finished after 3 s" in figures["threaded"]


OWN = "megatron_asynchzp: rank 0: all-gather of u0 failed: not finished after 3 s"


@pytest.mark.parametrize(
    "status, printed",
    [(0, OWN), (1, ""), (1, f"{OWN}\n{OWN}"), (1, f"Traceback (most recent)\n{OWN}"), (None, OWN)],
)
def test_an_end_without_one_line_and_status_1_fails_the_check(place, status, printed):
    log = place.folder / "log"
    log.write_text(printed)
    ended = Ended(status, 1.0, log)
    with mock.patch.object(endless, "run_command", lambda *_: ended), pytest.raises(CheckFailed):
        endless.run(place, ["inline"])
    log.write_text(OWN)
    with mock.patch.object(endless, "run_command", lambda *_: ended._replace(status=1)):
        endless.run(place, ["inline"])


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


@pytest.mark.slow
def test_a_megatron_run_that_fails_is_one_line(place):
    flags = megatron_runs.training_flags(place, 2, 2, *size_flags((3, 3, 3)))
    with pytest.raises(CheckFailed, match="wrong: megatron_asynchzp: .*shard-size 3"):
        megatron_runs.run_pretrain(place, "wrong", 1, flags, 120.0)


def test_series_are_equal_within_a_limit_or_the_check_fails():
    assert megatron_runs.require_equal("loss", [1.0, 2.0], [1.0, 2.000001], 1e-5) < 1e-5
    for ours, stock in [([1.0], [1.1]), ([], []), ([1.0], [1.0, 2.0]), ([float("nan")], [1.0])]:
        with pytest.raises(CheckFailed, match="loss"):
            megatron_runs.require_equal("loss", ours, stock, 1e-5)
