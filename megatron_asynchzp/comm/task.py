# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one task: collectives that run once, in their order, and what waits for their results."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_asynchzp.comm.collectives import AxisGroup, Steps, Unfinished, ranks_along
from megatron_asynchzp.comm.timeline import LANES, WAIT, Timeline
from megatron_asynchzp.device import Device
from megatron_asynchzp.errors import name_ranks
from megatron_asynchzp.failure.collective_failure import CollectiveFailure


class Runs(Protocol):
    """The driver that runs a task, as far as the task has to know it."""

    device: Device
    timeline: Timeline
    limit_s: float

    def has_failed(self) -> bool: ...
    def complete(self, task: "Task") -> None: ...


def _no_steps() -> Steps:
    yield from ()


class Task:
    """Collectives that a driver runs once, and their results.

    [Note: memory of a task] Once its collectives are issued a task forgets its closure, while a
    device may not have begun with them. The caching allocator gives memory back to the stream that
    allocated it as soon as nobody owns it. So what `start` uses is allocated within the generator,
    on the stream of the lane, or lies in memory that somebody else owns until `wait`.

    lane: one of LANES.
    unit: a name.
    axes: which the collectives go over.
    start: makes the generator.
    ready: events that must have happened before (None: has happened).
    after: tasks whose results it reads (None: there is none).
    name: lane and unit, for traces and records.

    The driver sets the rest. step: which step it belongs to; number: of its lane's tasks, from 1;
    is_usable: the results exist or, on a stream, are on their way; event: after which they can be
    read, from then on, where something comes after its last collective; signal: set with is_usable,
    for other threads.
    """

    driver: Runs
    step = 0
    number = 0
    is_usable = False
    signal: threading.Event | None = None
    event: Any = None
    _steps: Steps | None = None
    _work: Any = None  # that must be complete before the next step
    _last: Unfinished | None = None
    _end: Any = None  # the handle of its last collective, until somebody has waited for that
    _start_mark: Any = None

    def __init__(
        self,
        lane: str,
        unit: str,
        axes: Sequence[AxisGroup],
        start: Callable[[], Steps],
        ready: Sequence[Any] = (),
        after: "Sequence[Task | None]" = (),
    ):
        self.lane, self.unit, self.axes, self.name = lane, unit, axes, f"{lane} {unit}"
        self.start = start
        self.ready = ready
        self.after = [task for task in after if task is not None]

    @property
    def title(self) -> str:
        """Operation, unit, ranks and step, for messages."""
        ranks = ranks_along(self.axes)
        where = f"over {name_ranks(ranks)}" if ranks else "on this rank"
        return f"{LANES[self.lane]} of {self.unit} {where} in step {self.step}"

    def failure(self, error: BaseException) -> CollectiveFailure:
        """`error` as the one line that names this task."""
        if isinstance(error, CollectiveFailure):
            return error
        return CollectiveFailure.of(self.title, error)

    # ---- for the driver, in the thread that runs the task

    def issue(self) -> None:
        """Issue the first collective, after what it depends on."""
        device = self.driver.device
        for event in self.ready:
            device.wait_event(event)
        for task in self.after:
            task.order_stream()
        self._start_mark = self.driver.timeline.mark()
        self._steps = self.start()
        self._step()

    def _step(self) -> None:
        """Go on to the next collective that something waits for, or to the end."""
        assert self._steps is not None  # it was issued
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._steps, self._work = None, None
            self._last = end.value or Unfinished()

    @property
    def is_on_its_way(self) -> bool:
        """Whether its last collective was issued and not completed."""
        return self._last is not None and self._last.work is not None

    def issue_rest(self) -> None:
        """Issue all collectives; what needs the last one is put off."""
        while self._last is None:
            self._complete(self._work)
            self._step()

    def finish(self, keeps_handle: bool = False) -> None:
        """Complete what was issued, and issue and complete the rest.

        keeps_handle: whoever needs the results waits for the last collective itself, where nothing
        comes after that; an event of the lane would come after what the lane has got since then.
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
        # A task is held for as long as it is watched: longer than what it has read is needed.
        self.start, self.ready, self.after = _no_steps, (), []
        self._last = Unfinished()
        self.let_go()

    def order_stream(self) -> None:
        """Let what comes next in the current stream come after this task, which is usable."""
        if self._end is None:
            self.driver.device.wait_event(self.event)
            return
        self._complete(self._end)
        # Not held any longer: a handle owns a part of the memory that it has filled.
        self.event = self.driver.device.record_event()
        self._end = None

    def has_ended(self) -> bool:
        """Whether all that was issued on a device has ended. For any thread."""
        # In the order in which the thread that computes replaces one by the other.
        work = self._last.work if self._last is not None else None
        if (work := work or self._end) is not None:
            return work.is_completed()
        return self.driver.device.has_passed(self.event)

    def _complete(self, work: Any) -> None:
        self.driver.device.wait_work(work, self.driver.limit_s, self.driver.has_failed)

    def let_go(self) -> None:
        """Nobody has to wait for this task any longer."""
        self.is_usable = True
        if self.signal is not None:
            self.signal.set()

    # ---- for callers that need the results

    def await_usable(self) -> None:
        """Hold this thread until the task is usable.

        Raises the first failure of the driver, whichever task it was.
        """
        self.driver.complete(self)

    def wait(self) -> None:
        """Let the current stream read the results; the time it waits counts as exposed.

        For the thread that computes.
        """
        device, timeline = self.driver.device, self.driver.timeline
        if self.is_usable and not device.runs_ahead:
            self.await_usable()
            return
        start = timeline.mark()
        self.await_usable()
        self.order_stream()
        timeline.note(WAIT, self.name, start)
