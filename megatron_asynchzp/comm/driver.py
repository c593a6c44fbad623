# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns threads and streams: when the collectives of a task run, and how a failure of one reaches
the main thread.

A task is a generator that issues one collective after another and yields the handle of each. All
three schedules run the same generators and differ only in which thread drives them:

    inline        the caller, to the end, at once
    main-thread   the caller issues early and completes at the wait
    threaded      background threads, on streams of their own

[Note: one total order] Two threads could launch collectives in an order that differs between
ranks, which can deadlock on NCCL. So where there are streams one thread launches all of them, task
by task in the order of submission; submissions come from the main thread, whose program is the same
on every rank. A CPU has no streams: there each lane's thread is one. It runs the lane's tasks in
that same order, and waits, as a stream would, for what they depend on.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_asynchzp.comm.collectives import AxisGroup, Steps, ranks_along
from megatron_asynchzp.comm.timeline import LANES, WAIT, Timeline

_LAUNCH = "launch"
# After a failure: for all threads together. One may be held by a driver that never returns.
_ABANDON_S = 5.0
# How much longer than the limit the main thread waits, whose message is less exact than a lane's.
_MARGIN_S = 1.0


class CollectiveFailure(RuntimeError):
    """A collective failed or took too long; the message names operation, unit, ranks and step."""


OnFailure = Callable[[CollectiveFailure, Callable[[float], bool]], None]
"""Called with the first failure in the background thread that saw it, which has nothing else to
do; the second argument waits for so many seconds and returns whether the driver was closed."""

# torch appends the C++ frames to some of its messages, behind these words.
_CPP_TRACE = "Exception raised from"


class Task:
    """Collectives that a driver runs once, and their results.

    lane: one of LANES; unit: a name; axes: which the collectives go over; start: makes the
    generator; ready: events that must have happened before (None: has happened); after: tasks
    whose results it reads (None: there is none).

    The driver sets the rest. step: which step it belongs to; usable: set once the results exist or,
    on a stream, are on their way; event: after which they can be read, from then on.
    """

    driver: "Driver"
    step: int = 0

    def __init__(
        self,
        lane: str,
        unit: str,
        axes: Sequence[AxisGroup],
        start: Callable[[], Steps],
        ready: Sequence[Any] = (),
        after: "Sequence[Task | None]" = (),
    ):
        self.lane, self.unit, self.axes = lane, unit, axes
        self.start = start
        self.ready = ready
        self.after = [task for task in after if task is not None]
        self.usable = threading.Event()
        self.event: Any = None
        self._steps: Steps = iter(())
        self._work: Any = None
        self._start_mark: Any = None

    @property
    def title(self) -> str:
        """Operation, unit, ranks and step, for messages."""
        ranks = ranks_along(self.axes)
        where = f"over ranks {', '.join(map(str, ranks))}" if ranks else "on this rank"
        return f"{LANES[self.lane]} of {self.unit} {where} in step {self.step}"

    def failure(self, error: BaseException) -> CollectiveFailure:
        """`error` as the one line that names this task."""
        if isinstance(error, CollectiveFailure):
            return error
        reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
        if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
            reason = f"{type(error).__name__} {reason}".rstrip()
        failure = CollectiveFailure(f"{self.title} failed: {reason}")
        failure.__cause__ = error
        return failure

    # ---- for the driver, in the thread that runs the task

    def issue(self) -> None:
        """Issue the first collective, after what it depends on."""
        device = self.driver.device
        for event in (*self.ready, *(task.event for task in self.after)):
            device.wait_event(event)
        self._start_mark = device.mark()
        self._steps = self.start()
        self._work = next(self._steps, None)

    def finish(self) -> None:
        """Complete what was issued, and issue and complete the rest."""
        device = self.driver.device
        while self._work is not None:
            device.wait_work(self._work, self.driver.limit_s, self.driver.has_failed)
            self._work = next(self._steps, None)
        self.event = device.record_event()
        self.driver.timeline.add(self.lane, self.unit, self._start_mark, device.mark())
        self.usable.set()

    # ---- for those who need the results

    def await_usable(self) -> None:
        """Hold this thread until the task is usable.

        Raises the first failure of the driver, whichever task it was.
        """
        self.driver.complete(self)

    def wait(self) -> None:
        """Let the current stream read the results; the time it waits counts as exposed.

        For the main thread.
        """
        device = self.driver.device
        if self.usable.is_set() and not device.runs_ahead:
            self.await_usable()
            return
        start = device.mark()
        self.await_usable()
        device.wait_event(self.event)
        self.driver.timeline.add(WAIT, f"{self.lane} {self.unit}", start, device.mark())


class Driver:
    """Runs tasks. This one, `inline`, at once and on the calling thread.

    timeline: where tasks and waits are recorded; limit_s: seconds a collective may take.

    step: the latest that has begun; submitted: "lane unit" of each task, in order, until the
    comparison of orders takes it; last_task: the latest.
    """

    def __init__(self, timeline: Timeline, limit_s: float = 600.0):
        self.timeline, self.device, self.limit_s = timeline, timeline.device, limit_s
        self.step = 0
        self.submitted: list[str] = []
        self.last_task: Task | None = None
        self._failure: Exception | None = None

    def begin_step(self, step: int) -> None:
        """`step`, counted from 1, begins for one of the model chunks that share this driver."""
        if step != self.step:
            self.step = step
            self.timeline.fold()

    def has_failed(self) -> bool:
        """Whether a task failed."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: Exception) -> bool:
        """From now on every submit and every wait raises `failure`. False: one came before it."""
        if self._failure is not None:
            return False
        self._failure = failure
        return True

    @contextmanager
    def failing_as(self, task: Task) -> Generator[None]:
        """Any error within is a failure of `task`."""
        try:
            yield
        except Exception as error:
            self.fail(task.failure(error))
            self.raise_failure()

    def submit(self, task: Task) -> Task:
        """Run `task`, now or later. Raises the failure of this task, or of one before it."""
        self.raise_failure()
        task.driver, task.step = self, self.step
        self.last_task = task
        self.submitted.append(f"{task.lane} {task.unit}")
        self._start(task)
        return task

    def _start(self, task: Task) -> None:
        start = self.device.mark()
        with self.failing_as(task):
            task.issue()
            task.finish()
        self.timeline.add(WAIT, f"{task.lane} {task.unit}", start, self.device.mark())

    def complete(self, task: Task) -> None:
        """Return when `task` is usable. Raises the first failure."""
        self.raise_failure()

    def unfinished(self) -> list[Task]:
        """Tasks on their way, of every model chunk that shares this driver."""
        return []

    def close(self) -> None:
        """Leave nothing running; after a failure, which is raised again, without waiting."""
        self.raise_failure()


class MainThreadDriver(Driver):
    """Issues early from the main thread and completes at the wait: the paper's baseline.

    A task that reads what is still on its way is issued when the next task of that lane is: by
    then the main thread would otherwise have waited for nothing.
    """

    def __init__(self, timeline: Timeline, limit_s: float = 600.0):
        super().__init__(timeline, limit_s)
        self._streams = {lane: self.device.new_stream() for lane in LANES}
        self._unfinished: list[Task] = []
        self._postponed: set[Task] = set()

    def _start(self, task: Task) -> None:
        for other in self._unfinished:
            is_due = any(before.lane == task.lane for before in other.after)
            if is_due and other in self._postponed:
                self._issue(other)
        if self.device.runs_ahead or all(other.usable.is_set() for other in task.after):
            self._issue(task)
        else:
            self._postponed.add(task)
        self._unfinished = [other for other in self._unfinished if not other.usable.is_set()]
        self._unfinished.append(task)

    def _issue(self, task: Task) -> None:
        """Complete what `task` reads, then issue its first collective."""
        self._postponed.discard(task)
        for other in task.after:
            other.wait()
        with self.device.on_stream(self._streams[task.lane]), self.failing_as(task):
            task.issue()
            if self.device.runs_ahead:
                task.finish()

    def complete(self, task: Task) -> None:
        """As on a stream, every task before it in its lane is completed first: a caller that waits
        for the last reduction of a unit wants the results of all of them."""
        self.raise_failure()
        if task.usable.is_set():
            return
        for other in self._unfinished[: self._unfinished.index(task)]:
            if other.lane == task.lane:
                other.await_usable()
        if task in self._postponed:
            self._issue(task)
        if not task.usable.is_set():
            with self.failing_as(task):
                task.finish()

    def unfinished(self) -> list[Task]:
        return list(self._unfinished)

    def close(self) -> None:
        self.raise_failure()
        for task in self._unfinished:
            task.await_usable()


class ThreadDriver(Driver):
    """Runs tasks beside the main thread.

        streams   main      submit ... compute ... wait
                  launch        task | task | task         all into the lanes' streams
                  a lane               watch the limit

        CPU       main      submit ... compute ... wait
                  a lane        issue, complete | issue, complete

    delay: seconds to sleep before each action, for tests; on_failure: see OnFailure.
    """

    def __init__(
        self,
        timeline: Timeline,
        limit_s: float = 600.0,
        on_failure: OnFailure | None = None,
        delay: Callable[[], float] | None = None,
    ):
        super().__init__(timeline, limit_s)
        self._on_failure, self._delay = on_failure, delay
        self._streams = {lane: self.device.new_stream() for lane in LANES}
        self._lock = threading.Lock()
        self._unfinished: dict[Task, None] = {}  # in the order of submission
        self._is_closed = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._queues: dict[str, queue.SimpleQueue[Task | None]] = {}
        if self.device.runs_ahead:
            self._start_thread(_LAUNCH, self._launch)
        for lane in LANES:
            self._start_thread(lane, self._watch if self.device.runs_ahead else self._run)

    def _start_thread(self, name: str, act: Callable[[Task], None]) -> None:
        tasks = self._queues[name] = queue.SimpleQueue()
        self._threads[name] = threading.Thread(
            target=self._loop, args=(tasks, act), name=f"asynchzp-{name}", daemon=True
        )
        self._threads[name].start()

    # ---- the main thread

    def _start(self, task: Task) -> None:
        if self._is_closed.is_set():
            raise RuntimeError(f"{task.title}: submitted after the communication was closed")
        with self._lock:
            self.raise_failure()
            self._unfinished[task] = None
        self._queues[_LAUNCH if _LAUNCH in self._queues else task.lane].put(task)

    def complete(self, task: Task) -> None:
        self.raise_failure()
        # The lane has a limit too. This one is for a thread that never came back from issuing.
        if not task.usable.wait(self.limit_s + _MARGIN_S):
            late = TimeoutError(f"not issued and finished after {self.limit_s:g} s")
            self.fail(task.failure(late))
        self.raise_failure()

    def unfinished(self) -> list[Task]:
        with self._lock:
            return list(self._unfinished)

    def fail(self, failure: Exception) -> bool:
        """Every unfinished task ends with the first failure: no thread waits for it any longer."""
        with self._lock:
            is_first = super().fail(failure)
            unfinished, self._unfinished = list(self._unfinished), {}
        for task in unfinished:
            task.usable.set()
        return is_first

    def close(self) -> None:
        """Finish what was submitted and end the threads; after a failure, which is raised again,
        only end them."""
        self._is_closed.set()
        try:
            for task in self.unfinished():
                task.await_usable()
        except CollectiveFailure:
            pass
        if not self.has_failed():
            for name, thread in self._threads.items():
                self._queues[name].put(None)  # the launching one, if any, feeds those after it
                thread.join(self.limit_s)
        deadline = time.monotonic() + _ABANDON_S
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.raise_failure()

    # ---- the background threads

    def _loop(self, tasks: "queue.SimpleQueue[Task | None]", act: Callable[[Task], None]) -> None:
        self.device.bind_thread()
        while (task := tasks.get()) is not None:
            if self._delay is not None:
                time.sleep(self._delay())
            try:
                if not self.has_failed():
                    act(task)
            except BaseException as error:  # the main thread raises it where it waits
                failure = task.failure(error)
                if self.fail(failure) and self._on_failure is not None:
                    self._on_failure(failure, self._is_closed.wait)

    def _launch(self, task: Task) -> None:
        """Put the whole task into its lane's stream."""
        self._run(task)
        self._queues[task.lane].put(task)

    def _watch(self, task: Task) -> None:
        if not self.device.synchronize(task.event, self.limit_s, self.has_failed):
            raise TimeoutError(f"not finished after {self.limit_s:g} s")

    def _run(self, task: Task) -> None:
        for other in task.after:
            other.await_usable()
        with self.device.on_stream(self._streams[task.lane]):
            task.issue()
            task.finish()
        with self._lock:
            self._unfinished.pop(task, None)
