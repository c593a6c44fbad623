# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which thread waits in which schedule: a network that the test holds shut holds up the threads of
the threaded schedule, and never the thread that submits."""

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import Steps, Unfinished
from megatron_asynchzp.engine.comm.driver import Driver, crosses_groups, hash_of
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES
from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from tests.support.recording_device import Clock, CountingDevice, Group

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


class CountsWaits(CountingDevice):
    """num_waits: how often a stream was made to wait for what it had not waited for yet."""

    num_waits = 0

    def order(self, event: Clock, stream: str) -> None:
        known = self._clock(stream)
        self.num_waits += any(count > known.get(other, 0) for other, count in event.items())
        super().order(event, stream)


class Streams:
    """A device with streams whose collectives the test issues: what the host has put into them."""

    def __init__(self):
        self.device = CountsWaits()
        self.driver = start_driver(ScheduleConfig("main-thread"), self.device)
        self.issued: list[str] = []  # by unit and lane, and what comes behind

    def submit(self, lane: str, unit: str, then: bool = True, after: tuple[Task, ...] = ()) -> Task:
        name, group = f"{lane} {unit}", Group(lane, (0, 1))

        def steps() -> Steps:
            yield from ()
            self.issued.append(name)
            with self.device.recording():
                work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
            return Unfinished(work, (lambda: self.issued.append(f"add {name}")) if then else None)

        return self.driver.submit(Task(lane, unit, (), steps, after=after))


def test_on_a_device_nothing_waits_for_a_collective_until_its_result_is_needed():
    streams = Streams()
    reduction, gather = streams.submit("reduce", "u0"), streams.submit("gather", "u0", then=False)
    assert streams.issued == ["reduce u0", "gather u0"] and streams.device.num_waits == 0
    gather.wait()
    assert streams.device.num_waits == 1 and "add reduce u0" not in streams.issued
    reduction.wait()
    assert streams.issued[2:] == ["add reduce u0"]
    # The lane for the collective, and then this thread for the lane.
    assert streams.device.num_waits == 3
    streams.driver.close()


def test_on_a_device_what_reads_a_result_is_issued_when_the_next_of_that_lane_is():
    streams = Streams()
    for unit in ("u2", "u1", "u0"):
        reduction = streams.submit("reduce", unit)
        streams.submit("grad-sync", unit, after=(reduction,))
    issued = [name for name in streams.issued if not name.startswith("add")]
    # fmt: off
    assert issued == ["reduce u2", "grad-sync u2", "reduce u1", "grad-sync u1", "reduce u0"]
    # fmt: on
    assert streams.issued.index("add reduce u2") < streams.issued.index("grad-sync u2")
    assert streams.device.now() == {}  # the caller's own stream waits for none of them
    streams.driver.close()
    assert streams.issued[-1] == "add grad-sync u0"


def test_a_lane_issues_its_tasks_in_the_order_of_submission():
    """Also behind one that waits for a lane of which nothing more comes."""
    streams = Streams()
    sync = streams.submit("param-sync", "u0")
    streams.submit("gather", "u0", after=(sync,))
    grad_sync = streams.submit("grad-sync", "u1")
    streams.submit("gather", "u1", after=(grad_sync,))
    streams.submit("grad-sync", "u0")  # the task above is due
    gathers = [name for name in streams.issued if name.startswith("gather")]
    assert gathers == ["gather u0", "gather u1"]
    streams.driver.close()


def test_on_a_device_a_lane_leaves_at_most_two_tasks_unfinished():
    streams = Streams()
    for number in range(10):
        streams.submit("grad-sync", f"u{number}")
        added = [name for name in streams.issued if name.startswith("add")]
        assert added == [f"add grad-sync u{one}" for one in range(number - 1)]
    streams.driver.close()


def record_of(units: list[str]) -> list[str]:
    """What an evaluation leaves that uses these units, four in a forward."""
    driver = new_driver("inline")
    for index, unit in enumerate(units):
        if index % 4 == 0:
            driver.submitted.shorten()
        driver.submit(Task("gather", unit, (), lambda: iter(())))
    driver.close()
    return driver.submitted.entries


def test_what_crosses_groups_is_the_same_however_long_the_evaluations_of_each_were():
    def crossing(num_forwards: int) -> list[str]:
        driver = new_driver("inline")
        for _ in range(num_forwards):
            driver.submitted.shorten()
            for task in ("gather u0", "gather u1", "reduce u1"):
                lane, unit = task.split()
                driver.submit(Task(lane, unit, (), lambda: iter(())))
            if driver.counts["param-sync"] < 3:
                driver.submit(Task("param-sync", "u1", (), lambda: iter(())))
        driver.close()
        return list(filter(crosses_groups, driver.submitted.entries))

    assert crossing(3) == crossing(400) == crossing(2000) == ["param-sync u1"] * 3


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
