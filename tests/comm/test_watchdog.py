# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The time limit on a device with streams: what does not end is named, in every schedule, and what
has ended is let go without being asked for again and again."""

import threading
import time
import weakref
from functools import partial

import pytest

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.failure.watchdog import Watchdog
from megatron_asynchzp.engine.schedule import ON_STREAMS, ScheduleConfig
from tests.support.recording_device import RecordingDevice

LIMIT_S = 0.3
AMPLE_S = 5.0  # a busy machine stops a thread for half a second


class Event:
    """Has happened from the moment the test sets."""

    def __init__(self):
        self.has_happened = False
        self.num_questions = 0


class StreamsWithoutEnd(RecordingDevice):
    """Its streams do nothing until the test releases them."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def wait_event(self, event) -> None: ...

    def wait_work(self, *unused) -> None: ...

    def bind_thread(self) -> None: ...

    def has_passed(self, event) -> bool:
        if isinstance(event, Event):
            event.num_questions += 1
            return event.has_happened
        return True


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_a_task_that_does_not_end_is_named_and_ends_the_driver_though_nobody_waits_for_it(kind):
    device, reported, is_reported = StreamsWithoutEnd(), [], threading.Event()

    def report(failure, wait) -> None:
        reported.append(str(failure))
        is_reported.set()

    driver = start_driver(ScheduleConfig(kind, time_limit_s=LIMIT_S), device, report)
    for unit in ("u0", "u1"):
        driver.submit(Task("reduce", unit, (), lambda: iter([object()])))
    assert is_reported.wait(10)
    expected = "reduce-scatter of the gradients of u0 on this rank in step 0 failed: not finished"
    assert reported == [f"{expected} after {LIMIT_S:g} s"]
    with pytest.raises(CollectiveFailure, match="of u0"):
        driver.submit(Task("gather", "u2", (), lambda: iter([object()])))
    with pytest.raises(CollectiveFailure):
        driver.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("asynchzp") and t.is_alive()]


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_what_ends_in_time_is_let_go_and_no_error(kind):
    device = StreamsWithoutEnd()
    driver: Driver = start_driver(ScheduleConfig(kind, time_limit_s=AMPLE_S), device)
    tasks = weakref.WeakSet()
    for index in range(300):
        task = Task(tuple(LANES)[index % 2], f"u{index}", (), lambda: iter([object()]))
        tasks.add(task)
        driver.submit(task).wait()
        device.events[-1].has_happened = True
    del task
    deadline = time.monotonic() + 60
    while len(tasks) > len(LANES) and time.monotonic() < deadline:
        time.sleep(0.03)
    assert len(tasks) <= len(LANES)  # the latest of each lane
    driver.close()


def test_a_look_asks_a_handful_of_events_however_many_are_on_their_way():
    device, is_closed = StreamsWithoutEnd(), threading.Event()
    watchdog = Watchdog(device, AMPLE_S, lambda item: None, is_closed)
    events = [device.record_event() for _ in range(1000)]
    for event in events[:700]:
        event.has_happened = True
    for event in events:
        watchdog.watch("gather", partial(device.has_passed, event), None)
    deadline = time.monotonic() + 60
    while not any(event.num_questions for event in events) and time.monotonic() < deadline:
        time.sleep(0.01)
    is_closed.set()  # before the next look, half a second later
    watchdog.close()
    assert 1 <= sum(event.num_questions for event in events) <= 40
