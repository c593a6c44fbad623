# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A task: collectives that run once, in order, and the waits for their results."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_asynchzp.engine.comm.collectives import AxisGroup, Steps, Unfinished, ranks_along
from megatron_asynchzp.engine.comm.timeline import LANES, WAIT, Timeline
from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.errors import name_ranks


class TaskDriver(Protocol):
    """The part of a driver that a task uses."""

    device: Device
    timeline: Timeline
    limit_s: float

    def has_failed(self) -> bool: ...
    def complete(self, task: "Task") -> None: ...


def _no_steps() -> Steps:
    yield from ()


class Task:
    """Collectives that a driver runs once, and their results.

    [Note: memory of a task] A task drops its closure once its collectives are issued, perhaps
    before the device runs them. Then the caching allocator may reuse the closure's memory on the
    stream that allocated it. So `start` uses only memory that its generator allocates on the lane's
    stream, or that other code owns until `wait`.
    """

    # Set by the driver:
    driver: TaskDriver
    step = 0
    number = 0  # among the tasks of its lane, from 1
    in_graph = False  # see Driver.capturing
    is_usable = False  # the results exist or, on a device, are issued
    signal: threading.Event | None = None  # set together with is_usable, for other threads
    event: Any = None  # recorded after the results, unless `_end` stands for them
    _steps: Steps | None = None
    _work: Any = None  # to be completed before the generator's next step
    _last: Unfinished | None = None
    _end: Any = None  # the handle of the last collective, until `order_stream` waits for it
    _start_mark: Any = None

    def __init__(
        self,
        lane: str,  # one of LANES
        unit: str,
        axes: Sequence[AxisGroup],  # of the collectives
        start: Callable[[], Steps],
        ready: Sequence[Any] = (),  # events to wait for; None for a past event
        after: "Sequence[Task | None]" = (),  # tasks whose results it reads
    ):
        self.lane, self.unit, self.axes = lane, unit, axes
        self.name = f"{lane} {unit}"  # for traces and records
        self.start = start
        self.ready = ready
        self.after = [task for task in after if task is not None]

    @property
    def title(self) -> str:
        ranks = ranks_along(self.axes)
        place = f"over {name_ranks(ranks)}" if ranks else "on this rank"
        return f"{LANES[self.lane]} of {self.unit} {place} in step {self.step}"

    def failure(self, error: BaseException) -> CollectiveFailure:
        if isinstance(error, CollectiveFailure):
            return error
        return CollectiveFailure.of(self.title, error)

    # ---- for the driver, in the thread that runs the task

    def issue(self) -> None:
        device = self.driver.device
        for event in self.ready:
            device.wait_event(event)
        for task in self.after:
            task.order_stream()
        self._start_mark = self.driver.timeline.mark()
        self._steps = self.start()
        self._step()

    def _step(self) -> None:
        assert self._steps is not None  # it was issued
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._steps, self._work = None, None
            self._last = end.value or Unfinished()

    @property
    def is_on_its_way(self) -> bool:
        return self._last is not None and self._last.work is not None

    def issue_rest(self) -> None:
        """Issue all collectives; `finish` does the work after the last."""
        while self._last is None:
            self._complete(self._work)
            self._step()

    def finish(self, keeps_handle: bool = False) -> None:
        """Issue and complete everything.

        With `keeps_handle`, if no work follows the last collective, readers wait for its handle: an
        event would be recorded only after the lane's later tasks.
        """
        self.issue_rest()
        work, then, holds = self._last or Unfinished()
        is_end = then is None and not holds and self._start_mark is None
        if keeps_handle and work is not None and is_end:
            self._end = work
        else:
            if work is not None:
                self._complete(work)
            if then is not None:
                then()
            self.event = self.driver.device.record_event()
            self.driver.timeline.note(self.lane, self.unit, self._start_mark)
        # The watchdog holds the task for longer than its inputs are needed.
        self.start, self.ready, self.after = _no_steps, (), []
        self._last = Unfinished()
        self.let_go()

    def order_stream(self) -> None:
        """Order the current stream after this task, which is usable."""
        if self._end is None:
            self.driver.device.wait_event(self.event)
            return
        self._complete(self._end)
        # Drop the handle, which owns a part of the memory that it has filled.
        self.event = self.driver.device.record_event()
        self._end = None

    def has_ended(self) -> bool:
        """Return whether all work issued on a device has ended. For any thread."""
        if self.in_graph:
            return True
        # Reads in the order in which the computing thread replaces `_last` by `_end` and `event`.
        work = self._last.work if self._last is not None else None
        if (work := work or self._end) is not None:
            return work.is_completed()
        return self.driver.device.has_passed(self.event)

    def _complete(self, work: Any) -> None:
        self.driver.device.wait_work(work, self.driver.limit_s, self.driver.has_failed)

    def let_go(self) -> None:
        """Mark the task as usable and end every wait for it."""
        self.is_usable = True
        if self.signal is not None:
            self.signal.set()

    # ---- for callers that need the results

    def await_usable(self) -> None:
        """Hold this thread until the task is usable; raise the driver's first failure."""
        self.driver.complete(self)

    def wait(self) -> None:
        """Let the computing thread's stream read the results; the wait counts as exposed."""
        device, timeline = self.driver.device, self.driver.timeline
        if self.is_usable and not device.runs_ahead:
            self.await_usable()
            return
        start = timeline.mark()
        self.await_usable()
        self.order_stream()
        timeline.note(WAIT, self.name, start)
