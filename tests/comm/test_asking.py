# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a driver asks the other ranks after a failure, and what it does when another rank failed."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.failure.other_collective import collective_of
from megatron_asynchzp.engine.failure.saves import SaveLog
from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig

_TITLE = "all-gather of the parameters of u0 on this rank in step 0"


class Others:
    """In place of a roll call: what was asked, and an answer."""

    def __init__(self):
        self.asked: list[tuple] = []

    def find_missing(self, *suspect: Any) -> str:
        self.asked.append(suspect)
        return "no answer from rank 3"

    def close(self) -> None: ...


class Broken:
    """The handle of a collective that has failed."""

    def __init__(self, error: Exception):
        self._error = error

    def wait(self, _: Any = None) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return False


def fail(kind: str, error: Exception) -> tuple[str, list[tuple]]:
    driver, others = start_driver(ScheduleConfig(kind, time_limit_s=20.0), CpuDevice()), Others()
    driver.roll_call = others
    with pytest.raises(CollectiveFailure) as raised:
        driver.submit(Task("gather", "u0", (), lambda: iter([Broken(error)]))).wait()
    with pytest.raises(CollectiveFailure):
        driver.close()
    return str(raised.value), others.asked


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_failure_that_a_peer_may_have_caused_names_the_missing_ranks_and_asks_once(kind):
    text, asked = fail(kind, RuntimeError("Timed out"))
    assert text == f"{_TITLE} failed: Timed out; no answer from rank 3"
    assert asked == [("gather", 1, ())]


def test_a_mistake_of_this_rank_asks_nobody():
    assert fail("threaded", ValueError("a bug")) == (f"{_TITLE} failed: ValueError a bug", [])


def driver_that_reports() -> tuple[Driver, list[str]]:
    reported: list[str] = []

    def report(failure: CollectiveFailure, _: Any) -> None:
        reported.append(str(failure))

    driver = start_driver(ScheduleConfig("inline"), CpuDevice(), report)
    driver.roll_call = Others()
    return driver, reported


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_driver_without_tasks_or_whose_tasks_have_finished_does_not_stand_still(kind):
    driver = start_driver(ScheduleConfig(kind), CpuDevice())
    assert [driver.stalled_s(), driver.stalled_s()] == [0.0, 0.0]
    driver.submit(Task("gather", "u0", (), lambda: iter(()))).wait()
    driver.stalled_s()
    time.sleep(0.01)
    assert driver.stalled_s() == 0.0
    driver.close()


def test_a_rank_ends_with_another_that_has_failed_and_names_where_it_was():
    driver, reported = driver_that_reports()
    driver.submit(Task("gather", "u0", (), lambda: iter(())))
    driver.fail_with_others()
    assert reported == [f"{_TITLE} failed: another rank has failed; no answer from rank 3"]
    with pytest.raises(CollectiveFailure, match="another rank has failed"):
        driver.submit(Task("gather", "u1", (), lambda: iter(())))


def test_a_rank_that_has_failed_itself_or_is_closed_adds_nothing_when_another_calls():
    driver, reported = driver_that_reports()
    driver.fail(CollectiveFailure("its own"))
    driver.fail_with_others()
    closed, of_closed = driver_that_reports()
    closed.close()
    closed.fail_with_others()
    assert (reported, of_closed) == ([], [])


@pytest.fixture
def world_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_of_a_script_is_named_with_its_ranks_and_caller(world_of_one):
    def sum_the_losses() -> None:
        dist.all_reduce(torch.zeros(1), op="no such thing")

    with pytest.raises(Exception) as raised:
        sum_the_losses()
    assert collective_of(raised.value) == "all_reduce over rank 0, called by sum_the_losses,"
    assert collective_of(ValueError()) is None


def test_a_main_thread_that_is_held_in_a_collective_of_megatron_is_named(world_of_one, monkeypatch):
    driver, reported = driver_that_reports()
    monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", lambda group: ended.wait(20))
    ended = threading.Event()

    def call() -> None:
        driver.fail_with_others()
        ended.set()

    threading.Thread(target=call).start()
    dist.barrier()
    title = "barrier over rank 0, called by test_a_main_thread_that_is_held_in_a_collective"
    assert reported[0].startswith(title)
    assert reported[0].endswith(
        ", in step 0 failed: another rank has failed; no answer from rank 3"
    )


def in_another_thread(ask):
    """What ask() returns there, as the roll call asks."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def test_a_rank_that_writes_a_checkpoint_names_it_when_another_has_failed(world_of_one):
    driver, reported = driver_that_reports()
    driver.submit(Task("gather", "u0", (), lambda: iter(())))
    assert not in_another_thread(driver.is_writing)
    with driver.saves.entering("runs/iter_0000002"):
        assert in_another_thread(driver.is_writing)
        in_another_thread(driver.fail_with_others)
    title = "the save of runs/iter_0000002 failed: another rank has failed"
    assert reported == [f"{title}; no answer from rank 3"]


def test_a_rank_that_waits_in_a_save_is_not_one_that_writes(world_of_one, monkeypatch):
    """In a collective of torch, nor in one of the engine, which then is what it names."""
    driver, reported = driver_that_reports()
    said = []

    def ask(*_):
        said.append(in_another_thread(driver.is_writing))

    def collective():
        ask()
        in_another_thread(driver.fail_with_others)
        yield from ()

    monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", ask)
    with driver.saves.entering("runs/iter_0000002"):
        dist.barrier()
        driver.submit(Task("gather", "u0", (), collective))
    assert len(said) > 1 and not any(said)
    assert len(reported) == 1 and reported[0].startswith("all-gather of the parameters of u0 ")


def test_a_save_beside_training_is_the_oldest_that_is_not_finished():
    saves = SaveLog()
    assert saves.title(None) is None
    with saves.entering(None):
        assert saves.current is None
        saves.pending += ["a", "b"]
        assert saves.title("barrier") == "barrier in the save of a"
        saves.pending.remove("a")
        assert saves.title(None) == "the save of b"
    assert saves.current is None
