# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns threads and streams, and with them when a collective runs and who learns of its failure.
Must not know what is moved.

A task is a generator that issues one collective after another and yields the handle of each. All
three schedules run the same generators and differ only in who drives them:

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_asynchzp.comm.order_check import IssueLog
from megatron_asynchzp.comm.task import LANES, CollectiveFailure, Task, failure_of
from megatron_asynchzp.comm.timeline import WAIT, Timeline

_LAUNCH = "launch"
# After a failure: for all threads together. One may be held by a driver that never returns.
_ABANDON_S = 5.0
# How much longer than the limit the main thread waits, whose word is less exact than a lane's.
_MARGIN_S = 1.0

OnFailure = Callable[[CollectiveFailure, Callable[[float], bool]], None]
"""Called with the first failure in the background thread that saw it, which has nothing else to
do; the second argument waits for so many seconds and says whether the driver was closed."""


class Job:
    """One submitted task. `wait` is for the main thread."""

    def __init__(self, task: Task, driver: "Driver"):
        self.task = task
        self._driver = driver
        self._usable = threading.Event()
        self._work: Any = None
        self._start_mark: Any = None
        self.event: Any = None
        driver.log.add(task.lane, task.unit)

    def begin(self) -> None:
        """Issue the first collective, after what it depends on."""
        device = self._driver.timeline.device
        for event in (*self.task.ready, *(job.event for job in self.task.after)):
            device.wait_event(event)
        self._start_mark = device.mark()
        self._steps = self.task.start()
        self._advance()

    def _advance(self) -> None:
        self._work = next(self._steps, None)

    def finish(self) -> None:
        """Complete what was issued, and issue and complete what is left."""
        device = self._driver.timeline.device
        while self._work is not None:
            device.wait_work(self._work, self._driver.limit_s, self._driver.has_failed)
            self._advance()
        self.event = device.record_event()
        lane, unit = self.task.lane, self.task.unit
        self._driver.timeline.add(lane, unit, self._start_mark, device.mark())
        self._usable.set()

    def give_up(self) -> None:
        """Let go whoever waits: the driver has failed."""
        self._usable.set()

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    def await_usable(self) -> None:
        """Hold this thread until the results exist or, on a stream, are on their way.

        Raises the first failure of the driver, whichever job it was.
        """
        self._driver.raise_failure()
        # The lane has a limit too. This one is for a thread that never came back from issuing.
        limit_s = self._driver.limit_s
        if not self._usable.wait(limit_s + _MARGIN_S):
            late = TimeoutError(f"not issued and finished after {limit_s:g} s")
            self._driver.fail(failure_of(self.task, late))
        self._driver.raise_failure()

    def wait(self) -> None:
        """Let the current stream read the results; the time it waits counts as exposed."""
        device, timeline = self._driver.timeline.device, self._driver.timeline
        if self.is_usable and not device.runs_ahead:
            self.await_usable()
            return
        start = device.mark()
        self.await_usable()
        device.wait_event(self.event)
        timeline.add(WAIT, f"{self.task.lane} {self.task.unit}", start, device.mark())


class Driver:
    """Runs tasks. This one, `inline`, at once and on the calling thread.

    timeline: where the jobs and the waits are noted; limit_s: seconds a collective may take.
    """

    def __init__(self, timeline: Timeline, limit_s: float = 600.0):
        self.timeline, self.limit_s = timeline, limit_s
        self.log = IssueLog()
        self.last_task: Task | None = None
        self._step = 0
        self._failure: Exception | None = None

    def begin_step(self, step: int) -> None:
        """`step`, counted from 1, begins for one of the runtimes that share this driver."""
        if step != self._step:
            self._step = step
            self.timeline.fold()

    def has_failed(self) -> bool:
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
    def naming(self, task: Task) -> Iterator[None]:
        """Any error within is a failure of `task`."""
        try:
            yield
        except Exception as error:
            self.fail(failure_of(task, error))
            self.raise_failure()

    def submit(self, task: Task) -> Job:
        """Raises CollectiveFailure where the task, or one before it, failed."""
        self.raise_failure()
        job = self._new_job(task)
        self._start(job)
        return job

    def _new_job(self, task: Task) -> Job:
        self.last_task = task
        return Job(task, self)

    def _start(self, job: Job) -> None:
        task = job.task
        start = self.timeline.device.mark()
        with self.naming(task):
            job.begin()
            job.finish()
        title = f"{task.lane} {task.unit}"
        self.timeline.add(WAIT, title, start, self.timeline.device.mark())

    def unfinished_jobs(self, *lanes: str) -> list[Job]:
        """What is on its way in these lanes, of all who share this driver."""
        return [job for job in self._list_unfinished() if job.task.lane in lanes]

    def _list_unfinished(self) -> list[Job]:
        return []

    def close(self) -> None:
        """Leave nothing running; after a failure, which is raised again, without waiting."""
        self.raise_failure()


class _LateJob(Job):
    """Issued by the main thread as early as it can be; the rest follows when somebody waits."""

    is_begun = False

    def begin_late(self) -> None:
        """Complete what this job reads, then issue its first collective."""
        driver, device = self._driver, self._driver.timeline.device
        self.is_begun = True
        for other in self.task.after:
            other.wait()
        with device.on_stream(driver.streams[self.task.lane]), driver.naming(self.task):
            self.begin()
            if device.runs_ahead:
                self.finish()

    def await_usable(self) -> None:
        self._driver.raise_failure()
        self._driver.finish_before(self)
        if not self.is_begun:
            self.begin_late()
        if not self.is_usable:
            with self._driver.naming(self.task):
                self.finish()


class MainThreadDriver(Driver):
    """Issues early from the main thread and completes at the wait: the paper's baseline.

    A task that reads what is still on its way is issued when the next task of that lane is: by
    then the main thread would otherwise have waited for nothing.
    """

    def __init__(self, timeline: Timeline, limit_s: float = 600.0):
        super().__init__(timeline, limit_s)
        self.streams = {lane: timeline.device.new_stream() for lane in LANES}
        self._unfinished: list[_LateJob] = []

    def _new_job(self, task: Task) -> Job:
        self.last_task = task
        return _LateJob(task, self)

    def _start(self, job: Job) -> None:
        task = job.task
        for other in self._unfinished:
            if not other.is_begun and any(j.task.lane == task.lane for j in other.task.after):
                other.begin_late()
        if self.timeline.device.runs_ahead or all(other.is_usable for other in task.after):
            job.begin_late()
        self._unfinished = [other for other in self._unfinished if not other.is_usable]
        self._unfinished.append(job)

    def finish_before(self, job: Job) -> None:
        """Complete the jobs before `job` in its lane, as on a stream: who waits for the last
        reduction of a unit wants the results of all of them."""
        if job.is_usable:
            return
        for other in self._unfinished[: self._unfinished.index(job)]:
            if other.task.lane == job.task.lane:
                other.await_usable()

    def _list_unfinished(self) -> list[Job]:
        return list(self._unfinished)

    def close(self) -> None:
        self.raise_failure()
        for job in self._unfinished:
            job.await_usable()


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
        self._streams = {lane: timeline.device.new_stream() for lane in LANES}
        self._lock = threading.Lock()
        self._live: dict[Job, None] = {}  # in the order of submission
        self._is_closed = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._queues: dict[str, queue.SimpleQueue] = {}
        if timeline.device.runs_ahead:
            self._start_thread(_LAUNCH, self._launch)
        for lane in LANES:
            self._start_thread(lane, self._watch if timeline.device.runs_ahead else self._run)

    def _start_thread(self, name: str, act: Callable[[Job], None]) -> None:
        jobs = self._queues[name] = queue.SimpleQueue()
        self._threads[name] = threading.Thread(
            target=self._loop, args=(jobs, act), name=f"asynchzp-{name}", daemon=True
        )
        self._threads[name].start()

    def _start(self, job: Job) -> None:
        if self._is_closed.is_set():
            raise RuntimeError(f"{job.task.title}: asked for after the communication was closed")
        with self._lock:
            self.raise_failure()
            self._live[job] = None
        self._queues[_LAUNCH if _LAUNCH in self._queues else job.task.lane].put(job)

    def _list_unfinished(self) -> list[Job]:
        with self._lock:
            return list(self._live)

    def _loop(self, jobs: queue.SimpleQueue, act: Callable[[Job], None]) -> None:
        self.timeline.device.bind_thread()
        while (job := jobs.get()) is not None:
            if self._delay is not None:
                time.sleep(self._delay())
            try:
                if self._failure is None:
                    act(job)
            except BaseException as error:  # the main thread learns of it where it waits
                failure = failure_of(job.task, error)
                if self.fail(failure) and self._on_failure is not None:
                    self._on_failure(failure, self._is_closed.wait)

    def _launch(self, job: Job) -> None:
        """Put the whole task into its lane's stream."""
        self._run(job)
        self._queues[job.task.lane].put(job)

    def _watch(self, job: Job) -> None:
        if not self.timeline.device.synchronize(job.event, self.limit_s, self.has_failed):
            raise TimeoutError(f"not finished after {self.limit_s:g} s")

    def _run(self, job: Job) -> None:
        for other in job.task.after:
            other.await_usable()
        with self.timeline.device.on_stream(self._streams[job.task.lane]):
            job.begin()
            job.finish()
        with self._lock:
            self._live.pop(job, None)

    def fail(self, failure: Exception) -> bool:
        """Every unfinished job ends with the first failure: nobody waits for what never comes."""
        with self._lock:
            is_first = super().fail(failure)
            unfinished, self._live = list(self._live), {}
        for job in unfinished:
            job.give_up()
        return is_first

    def close(self) -> None:
        """Finish what was submitted and end the threads; after a failure, which is raised again,
        only end them."""
        self._is_closed.set()
        try:
            for job in self._list_unfinished():
                job.await_usable()
        except CollectiveFailure:
            pass
        if not self.has_failed():
            for name, thread in self._threads.items():
                self._queues[name].put(None)  # the launching one, if any, feeds those after it
                thread.join(self.limit_s)
        deadline = time.monotonic() + _ABANDON_S
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.raise_failure()


def new_driver(
    kind: str, timeline: Timeline, limit_s: float = 600.0, on_failure: OnFailure | None = None
) -> Driver:
    """The driver of a schedule: "inline", "main-thread" or "threaded"."""
    if kind == "threaded":
        return ThreadDriver(timeline, limit_s, on_failure)
    return {"inline": Driver, "main-thread": MainThreadDriver}[kind](timeline, limit_s)
