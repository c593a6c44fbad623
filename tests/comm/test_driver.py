# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which thread waits in which schedule: a network that the test holds shut holds up the threads of
the threaded schedule, and never the thread that submits."""

import threading
import weakref
from datetime import timedelta
from typing import Any

from megatron_asynchzp.comm.driver import Driver, Task, hash_of
from megatron_asynchzp.comm.schedules import start_driver
from megatron_asynchzp.comm.timeline import LANES
from megatron_asynchzp.device import CpuDevice
from megatron_asynchzp.schedule import ScheduleConfig

# How long a submission that waits for the network would take before it gives up.
LIMIT_S = 3.0


class HeldWork:
    """The handle of a collective that ends when the test lets it."""

    def __init__(self):
        self.end = threading.Event()

    def wait(self, timeout: timedelta) -> None:
        if not self.end.wait(timeout.total_seconds()):
            raise RuntimeError("not finished yet")

    def is_completed(self) -> bool:
        return self.end.is_set()


def new_driver(kind: str) -> Driver:
    return start_driver(ScheduleConfig(kind, time_limit_s=LIMIT_S), CpuDevice())


def submit(driver: Driver, lane: str, work: Any, after: tuple[Task, ...] = ()) -> Task:
    return driver.submit(Task(lane, "u0", (), lambda: iter([work]), after=after))


def test_submit_returns_in_the_threaded_schedule_while_every_lane_waits_for_the_network():
    driver = new_driver("threaded")
    works = {lane: HeldWork() for lane in LANES}
    tasks = {lane: submit(driver, lane, work) for lane, work in works.items()}
    behind = {lane: submit(driver, lane, works[lane], (tasks["gather"],)) for lane in LANES}
    assert not any(task.is_usable for task in [*tasks.values(), *behind.values()])
    # Lanes do not wait for each other: the last one that was submitted may be the first to end.
    for lane in reversed(works):
        works[lane].end.set()
        tasks[lane].wait()
        assert not any(behind[other].is_usable for other in works) or lane == "gather"
    for task in behind.values():
        task.wait()
    driver.close()


def test_submit_issues_but_does_not_wait_in_the_main_thread_schedule():
    driver = new_driver("main-thread")
    works = {lane: HeldWork() for lane in LANES}
    tasks = [submit(driver, lane, work) for lane, work in works.items()]
    assert not any(task.is_usable for task in tasks)
    for work in works.values():
        work.end.set()
    driver.close()
    assert all(task.is_usable for task in tasks)


def record_of(units: list[str]) -> list[str]:
    """What an evaluation leaves that uses these units, four in a forward."""
    driver = new_driver("inline")
    for index, unit in enumerate(units):
        if index % 4 == 0:
            driver.shorten_record()
        driver.submit(Task("gather", unit, (), lambda: iter(())))
    driver.close()
    return driver.submitted


def test_a_finished_task_holds_nothing_that_it_has_read():
    driver = start_driver(ScheduleConfig("inline"), CpuDevice())
    read = threading.Event()  # anything that can be referred to weakly
    reference = weakref.ref(read)
    task = driver.submit(Task("gather", "u", (), lambda read=read: iter(()), ready=(None,)))
    del read
    assert task.is_usable and reference() is None
    driver.close()


def test_an_evaluation_of_any_length_leaves_a_short_record_that_shows_each_difference():
    units = [f"u{index % 7}" for index in range(5000)]
    record = record_of(units)
    assert len(record) < 1100
    assert record_of(units) == record
    for changed in (0, 1234, 4999):
        other = [*units[:changed], "another", *units[changed + 1 :]]
        assert hash_of(record_of(other)) != hash_of(record)
