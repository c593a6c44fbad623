# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Streams and events of torch.cpu: who waits for what, and who blocks."""

import threading

import pytest
import torch

from scripts.testbed.fabric import streams


class Task:
    """Work that ends when the test lets it."""

    def __init__(self):
        self.finished = threading.Event()
        self.error: Exception | None = None

    def is_completed(self):
        return self.finished.is_set()

    def exception(self):
        return self.error

    def block(self):
        assert self.finished.wait(10)
        if self.error:
            raise self.error


@pytest.fixture(autouse=True)
def installed():
    with streams.install_streams():
        yield


def blocks(call, task: Task) -> bool:
    """Whether `call` returns only after the task has ended."""
    returned = threading.Event()
    thread = threading.Thread(target=lambda: (call(), returned.set()))
    thread.start()
    early = returned.wait(0.05)
    task.finished.set()
    thread.join()
    return not early


def test_a_default_stream_blocks_and_a_side_stream_notes():
    task = Task()
    assert blocks(lambda: streams.current_stream().wait_for([task]), task)
    task, side = Task(), torch.cpu.Stream()
    side.wait_for([task])
    assert side.pending() == [task] and not side.query()
    task.finished.set()
    assert side.query()


def test_what_a_side_stream_waits_for_travels_through_events_and_streams():
    task, first, second, third = Task(), torch.cpu.Stream(), torch.cpu.Stream(), torch.cpu.Stream()
    first.wait_for([task])
    second.wait_stream(first)
    event = second.record_event()
    third.wait_event(event)
    assert third.pending() == [task]
    second.wait_for([later := Task()])  # after the event: no part of it
    assert later not in event.pending() and not event.query()
    assert blocks(event.synchronize, task)
    assert event.query()


def test_a_tensor_operation_on_a_side_stream_waits_for_what_it_may_read():
    data, side = torch.zeros(4), torch.cpu.Stream()

    class Arrival(Task):
        def block(self):
            data.fill_(1.0)
            self.finished.set()

    before = streams.host_waits()
    with torch.cpu.stream(side):
        side.wait_for([Arrival()])
        view = data.view(2, 2)  # reads nothing
        torch.empty(3)
        assert streams.host_waits() == before
        total = view.sum()
    assert total == 4.0 and streams.host_waits() == before + 1


def test_an_operation_in_place_comes_after_what_its_stream_waits_for_and_holds_nobody_up():
    task, side, total = Task(), torch.cpu.Stream(), torch.zeros(2)
    brought = torch.zeros(2)
    waits = streams.host_waits()
    side.wait_for([task])
    with torch.cpu.stream(side):
        total += brought  # returns at once: what is brought is not there yet
        total.mul_(2)
        event = side.record_event()
    brought.fill_(3.0)
    assert not event.query() and streams.host_waits() == waits
    assert blocks(event.synchronize, task)
    assert total.tolist() == [6.0, 6.0]


def test_a_failure_reaches_who_waits_for_an_operation_after_it():
    task, side, total = Task(), torch.cpu.Stream(), torch.zeros(2)
    side.wait_for([task])
    with torch.cpu.stream(side):
        total += 1
        event = side.record_event()
    task.error = ValueError("lost")
    task.finished.set()
    with pytest.raises(ValueError, match="lost"):
        event.synchronize()
    assert total.tolist() == [0.0, 0.0]
