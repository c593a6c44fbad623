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
