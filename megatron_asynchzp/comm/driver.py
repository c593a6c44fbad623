# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns when the collectives of a task run, on which stream, and how a failure of one reaches the
main thread.

A task is a generator that issues one collective after another (collectives.py, Steps). All
schedules run the same generators and differ only in which thread drives them:

    inline        the caller, to the end, at once
    main-thread   the caller issues early, and completes where the results are needed
                  (main_thread_driver.py)
    threaded      background threads (thread_driver.py), on a CPU

[Note: one total order] Two threads could launch collectives in an order that differs between
ranks, which can deadlock on NCCL. So where there are streams only the thread that computes
launches, whose program, Megatron's collectives included, is the same on every rank. A CPU has no
streams: there each lane's thread is one. It runs the lane's tasks in the order of submission, and
waits, as a stream would, for what they depend on.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_asynchzp.comm.collectives import ranks_along
from megatron_asynchzp.comm.submitted import Submitted
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.comm.timeline import LANES, WAIT, Timeline, profiler_range
from megatron_asynchzp.failure.collective_failure import CollectiveFailure
from megatron_asynchzp.failure.last_line import end_where_main_stays
from megatron_asynchzp.failure.other_collective import (
    calls_of_main_thread,
    collective_of_main_thread,
    is_main_thread_waiting,
)
from megatron_asynchzp.failure.roll_call import OTHERS_FIRST_S, RollCall
from megatron_asynchzp.failure.saves import Saves
from megatron_asynchzp.failure.standstill import Progress
from megatron_asynchzp.failure.watchdog import Watchdog

OnFailure = Callable[[CollectiveFailure, Callable[[float], bool]], None]
"""Called with the first failure in the background thread that saw it, which has nothing else to
do; the second argument waits for so many seconds and returns whether the driver was closed."""


class FailingAs:
    """A context: any error within is a failure of `task`. Every task passes here, and a generator
    would cost three times as much."""

    __slots__ = ("_driver", "_task")

    def __init__(self, driver: "Driver", task: Task):
        self._driver, self._task = driver, task

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self._driver.fail_and_raise(self._task, error)


class Driver:
    """Runs tasks. This one, `inline`, at once and on the calling thread.

    timeline: where tasks and waits are recorded.
    limit_s: seconds a collective may take.
    on_failure: see OnFailure.

    step: the latest that has begun.
    submitted: the record of all tasks.
    counts: tasks submitted so far, by lane; all ranks have the lanes in one order.
    latest: of each lane the task that was submitted last.
    last_task: of all lanes.
    compared: the ranks that have to submit the same, each with whether that is all (it computes in
        step), or only what crosses groups.
    saves: checkpoints that this rank is saving, for messages.
    roll_call: who is asked, when something failed, which ranks are missing; it is closed with the
        driver.
    """

    def __init__(
        self, timeline: Timeline, limit_s: float = 600.0, on_failure: OnFailure | None = None
    ):
        self.timeline, self.device, self.limit_s = timeline, timeline.device, limit_s
        self.step = self.num_steps = 0
        self.submitted = Submitted()
        self.counts = Counter[str](dict.fromkeys(LANES, 0))
        self.latest: dict[str, Task] = {}
        self.last_task: Task | None = None
        self._failure: Exception | None = None
        self._failing = threading.Lock()
        self._on_failure = on_failure
        self.roll_call: RollCall | None = None
        self.compared: dict[int, bool] = {}
        self._num_seen, self._seen_s = 0, time.monotonic()
        self._is_told = threading.Event()  # the main thread, of the failure
        self.saves = Saves()
        self._is_closed = threading.Event()
        # On a device that runs ahead the host waits for no collective.
        self._watchdog = Watchdog(self.device, limit_s, self._fail_as_late, self._is_closed)

    def begin_step(self, step: int) -> None:
        """The step of this number begins for one of the model chunks that share this driver."""
        if step != self.step:
            self.step = step
            self.num_steps += 1
            self.timeline.begin_step(step)

    # ---- failures

    def has_failed(self) -> bool:
        """Whether a task failed."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            if threading.current_thread() is threading.main_thread():
                self._is_told.set()
            raise self._failure

    def call_roll(self) -> None:
        """From now on ask other ranks where something fails or stands still. Every rank of the
        world has to come here."""
        self.roll_call = RollCall.of_world(
            self.counts, self.fail_with_others, self.is_writing, self
        )

    def fail(self, failure: Exception, suspect: tuple[Any, ...] | None = None) -> bool:
        """From now on every submit and every wait raises `failure`. False: one came before it.

        suspect: see RollCall.find_missing, where a peer may be the cause: the ranks are called,
            which takes seconds. Whoever fails meanwhile waits for it.
        """
        with self._failing:
            if self._failure is not None:
                return False
            if suspect is not None and self.roll_call is not None:
                missing = self.roll_call.find_missing(*suspect)  # on any failure: others hear of it
                if isinstance(failure, CollectiveFailure):
                    failure.add(missing)
            self._failure = failure
            return True

    def fail_and_raise(self, task: Task, error: Exception) -> None:
        """Raise `error` as the failure of `task`."""
        self.fail_task(task, error)
        self.raise_failure()

    def fail_task(self, task: Task, error: BaseException) -> bool:
        """As `fail`, for an error of `task`."""
        is_of_peer = isinstance(error, (RuntimeError, TimeoutError))
        suspect = (task.lane, task.number, ranks_along(task.axes))
        return self.fail(task.failure(error), suspect if is_of_peer else None)

    def fail_in_background(self, task: Task, error: BaseException) -> None:
        """As `fail_task`, in a thread that has nothing else to do: the main thread raises the
        failure where it waits, and may be stuck elsewhere."""
        self._report(self.fail_task(task, error))

    def fail_with_others(self, why: str = "") -> None:
        """Another rank has failed, and calls: this one would wait for it, and ends too, a moment
        later, because what it meets itself says more. In a thread of its own.

        why: where it has said so, it has asked already.
        """
        if self._is_closed.wait(OTHERS_FIRST_S):
            return
        error, where = RuntimeError(why or "another rank has failed"), collective_of_main_thread()
        title = self.saves.title(where) if where or self.is_writing() else None
        if where is None and title is None and self.last_task is not None:
            title = (self._unfinished_task() or self.last_task).title
        title = title or f"{where or 'what comes'} in step {self.step}"
        self._report(self.fail(CollectiveFailure.of(title, error), None if why else ()))

    # ---- [Note: apart], for the thread of the roll call

    def standing_s(self) -> float:
        """Seconds since which nothing was submitted while something is not finished; 0 where
        nothing is. The first call begins to count."""
        self.device.bind_thread()
        number, now = self.counts.total(), time.monotonic()
        if number != self._num_seen or self._unfinished_task() is None:
            self._num_seen, self._seen_s = number, now
            return 0.0
        return now - self._seen_s

    def _unfinished_task(self) -> Task | None:
        for task in tuple(self.latest.values()):
            if not (task.is_usable and task.has_ended()):
                return task
        return None

    def progress(self, is_closed: bool = False) -> Progress:
        """How far this rank is. is_closed: it submits nothing more."""
        tasks, crossing = map(list, self.submitted.recent)
        where = None if is_closed else collective_of_main_thread()
        task = self._unfinished_task() or self.last_task
        came = f"came last to the {task.title}" if task is not None else "has not called the model"
        doing = f"has closed, and {came}" if is_closed else came
        if where is not None:
            doing = f"is in {where.rstrip(',')}"
        calls = {} if is_closed else calls_of_main_thread()
        return Progress(tasks, crossing, calls, is_closed, doing)

    def is_writing(self) -> bool:
        """Whether the main thread saves and is in no collective: others may wait for its files."""
        return self.saves.current is not None and not is_main_thread_waiting()

    def _report(self, is_first: bool) -> None:
        failure = self._failure
        if not is_first or not isinstance(failure, CollectiveFailure):
            return
        if self._on_failure is not None:
            self._on_failure(failure, self._is_closed.wait)
        elif self.roll_call is not None:
            end_where_main_stays(failure, self._is_told.wait)

    def _fail_as_late(self, task: Task) -> None:
        self.fail_in_background(task, TimeoutError(f"not finished after {self.limit_s:g} s"))

    # ---- tasks

    def await_event(self, event: Any) -> None:
        """Hold the host until `event`, at most as long as a collective may take."""
        self.device.synchronize(event, self.limit_s, self.has_failed)
        self.raise_failure()

    def submit(self, task: Task) -> Task:
        """Run `task`, now or later. Raises the failure of this task, or of one before it."""
        if self._failure is not None or self._is_closed.is_set():
            self._refuse(task)
        task.driver, task.step = self, self.step
        self.last_task = self.latest[task.lane] = task
        self.submitted.add(task.name)
        self.counts[task.lane] += 1
        task.number = self.counts[task.lane]
        self._start(task)
        return task

    def _refuse(self, task: Task) -> None:
        self.raise_failure()
        raise RuntimeError(
            f"{task.title}: submitted after the communication was closed; use the "
            "model before its close()"
        )

    def _start(self, task: Task) -> None:
        start = self.timeline.mark()
        with FailingAs(self, task):
            self.run(task)
        self.timeline.note(WAIT, task.name, start)

    def run(self, task: Task) -> None:
        """Issue and complete all of `task`; on a device, in the current stream."""
        with profiler_range(task.name):
            task.issue()
            task.finish()
        if self.device.runs_ahead:
            self._watchdog.watch(task.lane, task.has_ended, task)

    def complete(self, task: Task) -> None:
        """Return when `task` is usable. Raises the first failure."""
        self.raise_failure()

    def close(self) -> None:
        """Leave nothing running; after a failure, which is raised again, without waiting."""
        self._is_closed.set()
        self._is_told.set()
        self._watchdog.close()
        if self.roll_call is not None:
            self.roll_call.close()
        self.raise_failure()
