# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Drivers that overlap communication with computation, and the start of a schedule's driver."""

import queue
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, override

from megatron_asynchzp.engine.comm.driver import ABANDON_S, Driver, FailureContext, OnFailure
from megatron_asynchzp.engine.comm.registered import RegisteredMemory
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES, Timeline, profiler_range
from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.schedule import AUTO, NOT_ON_STREAMS, ScheduleConfig
from megatron_asynchzp.errors import ConfigurationError


class MainThreadDriver(Driver):
    """The schedule `main-thread`: issues early, and completes when results are needed.

    On a CPU it is the paper's baseline; on a device the default, with a stream for each lane.

    [Note: nothing behind a collective] CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands for
    tensor and context parallelism, puts all streams into one queue, where a wait holds up all later
    work. So work after a collective is put off until its results are needed. A task that reads the
    results of another lane is issued just before that lane's next task, when a unit's computation
    has passed.

        main         B u2 |             B u1 |             B u0 |
        reduce            | u2          |    | u1          |    | u0
        grad-sync                            wait, u2           | wait, u1

    All of this follows from the order of calls, so launches have one order on all ranks.
    """

    def _prepare(self) -> None:
        self._streams = {lane: self.device.new_stream() for lane in LANES}
        self._unfinished: list[Task] = []
        self._postponed: set[Task] = set()

    def _start(self, task: Task) -> None:
        if self.device.runs_ahead:
            self._complete_older(task.lane)
        for later in self._unfinished:
            if later in self._postponed and any(first.lane == task.lane for first in later.after):
                self._issue(later)
        is_held_up = any(earlier.lane == task.lane for earlier in self._postponed)
        self._unfinished.append(task)
        self._postponed.add(task)
        if not is_held_up and all(source.is_usable for source in task.after):
            self._issue(task)
        self._unfinished = [left for left in self._unfinished if not left.is_usable]

    def _complete_older(self, lane: str) -> None:
        """Leave at most one older task of a lane unfinished, so that memory does not grow."""
        of_lane = [task for task in self._unfinished if task.lane == lane]
        if len(of_lane) > 1:
            self.complete(of_lane[-2])

    def _issue(self, task: Task) -> None:
        """Issue the first collective of `task`, on a device all of them.

        Earlier tasks of its lane are issued before, and the tasks that it reads are completed.
        """
        for earlier in self._unfinished[: self._unfinished.index(task)]:
            if earlier.lane == task.lane and earlier in self._postponed:
                self._issue(earlier)
        self._postponed.discard(task)
        for source in task.after:
            if self.device.runs_ahead:
                self.complete(source)
            else:
                source.wait()
        stream = self.device.on_stream(self._streams[task.lane])
        with FailureContext(self, task), stream, profiler_range(task.name):
            if self.device.runs_ahead:
                self._watch(task)  # before, since a launch that fails may leave others under way
            task.issue()
            if self.device.runs_ahead:
                task.issue_rest()
                if not task.is_on_its_way:
                    task.finish()

    def complete(self, task: Task) -> None:
        """Complete `task` after all earlier tasks of its lane.

        A caller that waits for the last reduction of a unit needs the results of all of them.
        """
        self.raise_failure()
        if task.is_usable:
            return
        for earlier in self._unfinished[: self._unfinished.index(task)]:
            if earlier.lane == task.lane:
                earlier.await_usable()
        if task in self._postponed:
            self._issue(task)
        if not task.is_usable:
            stream = self.device.on_stream(self._streams[task.lane])
            with FailureContext(self, task), stream, profiler_range(f"wait for {task.name}"):
                task.finish(keeps_handle=self.device.runs_ahead)

    @contextmanager
    @override
    def capturing(self) -> Generator[None]:
        self._unfinished.clear()  # they are usable
        with super().capturing():
            yield
            for task in list(self._unfinished):
                self.complete(task)
        self._unfinished.clear()

    def close(self) -> None:
        try:
            for task in self._unfinished:
                task.await_usable()
        finally:
            super().close()


# The main thread waits longer than the limit, because a lane's message is more exact.
_MARGIN_S = 1.0


class ThreadDriver(Driver):
    """The schedule `threaded`: a background thread for each lane.

    main      submit ... compute ... wait
    a lane        issue, complete | issue, complete
    """

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: dict[Task, None] = {}  # in the order of submission
        self._threads: list[threading.Thread] = []
        self._queues = {lane: self._start_thread(lane) for lane in LANES}

    def _start_thread(self, name: str) -> "queue.SimpleQueue[Task | None]":
        tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._loop, args=(tasks,), name=f"asynchzp-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return tasks

    # ---- the main thread

    def _start(self, task: Task) -> None:
        task.signal = threading.Event()
        with self._lock:
            self.raise_failure()
            self._unfinished[task] = None
        self._queues[task.lane].put(task)

    def complete(self, task: Task) -> None:
        self.raise_failure()
        signal = task.signal
        # The lane has a limit, too; this limit is for a thread that never returns from issuing.
        if signal is not None and not signal.wait(self.limit_s + _MARGIN_S):
            late = TimeoutError(f"not issued and finished after {self.limit_s:g} s")
            self.fail_task(task, late)
        self.raise_failure()

    def fail(self, failure: Exception, suspect: tuple[Any, ...] | None = None) -> bool:
        """End every unfinished task with the first failure, so that no thread waits for it."""
        # This may take seconds, during which the main thread can continue.
        is_first = super().fail(failure, suspect)
        with self._lock:
            unfinished, self._unfinished = list(self._unfinished), {}
        for task in unfinished:
            task.let_go()
        return is_first

    def close(self) -> None:
        """Finish all tasks and end the threads; after a failure only end them, and raise it."""
        self._is_closed.set()
        try:
            with self._lock:
                unfinished = list(self._unfinished)
            for task in unfinished:
                task.await_usable()
        except CollectiveFailure:
            pass
        deadline = time.monotonic() + (ABANDON_S if self.has_failed() else self.limit_s)
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        super().close()

    # ---- the background threads

    def _loop(self, tasks: "queue.SimpleQueue[Task | None]") -> None:
        while (task := tasks.get()) is not None:
            try:
                if not self.has_failed():
                    for source in task.after:
                        source.await_usable()
                    self.run(task)
                    with self._lock:
                        self._unfinished.pop(task, None)
            except BaseException as error:  # the main thread raises it when it waits
                self.fail_in_background(task, error)


def start_driver(
    config: ScheduleConfig, device: Device, on_failure: OnFailure | None = None
) -> Driver:
    """Start the driver of `config`; raise ConfigurationError for threads on a device of streams."""
    kind = config.kind
    if kind == AUTO:
        kind = "main-thread" if device.runs_ahead else "threaded"
    if kind == "threaded" and device.runs_ahead:
        raise ConfigurationError(f"the schedule threaded {NOT_ON_STREAMS}")
    new_driver: type[Driver] = {
        "inline": Driver,
        "main-thread": MainThreadDriver,
        "threaded": ThreadDriver,
    }[kind]
    driver = new_driver(Timeline(device, config.timed_every), config.time_limit_s, on_failure)
    driver.registered = RegisteredMemory(device, config.registers_memory, config.registers_windows)
    return driver
