# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Decides when a task's collectives run and on which stream, and reports failures.

A task is a generator that issues one collective after another (collectives.py, Steps). All
schedules run the same generators and differ only in the thread that drives them:

    inline        the caller, to the end, at once
    main-thread   the caller issues early, and completes where the results are needed
    threaded      background threads, on a CPU (both in drivers.py)

[Note: one total order] Two threads could launch collectives in an order that differs between ranks,
which can deadlock on NCCL. So on a device with streams only the computing thread launches: its
program, with Megatron's collectives, is the same on every rank. A CPU has no streams, so each lane
has a thread, which runs the lane's tasks in the order of submission and waits for their
dependencies, as a stream would.
"""

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from megatron_asynchzp.engine.comm.collectives import ranks_along
from megatron_asynchzp.engine.comm.registered import RegisteredMemory
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES, WAIT, Timeline, profiler_range
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure, exit_if_main_thread_stuck
from megatron_asynchzp.engine.failure.other_collective import (
    calls_of_main_thread,
    collective_of_main_thread,
    is_main_thread_waiting,
)
from megatron_asynchzp.engine.failure.roll_call import OWN_FAILURE_FIRST_S, RollCall
from megatron_asynchzp.engine.failure.saves import SaveLog
from megatron_asynchzp.engine.failure.standstill import LENGTH, Progress
from megatron_asynchzp.engine.failure.watchdog import Watchdog

_OF_MICRO_BATCHES = ("gather ", "reduce ")

# After a failure wait no longer: a call of the backend may never return, the device never be done.
ABANDON_S = 5.0
# `shorten` folds a record with more entries.
_LONG_RECORD = 1000


def hash_of(entries: Iterable[str]) -> int:
    value = 0
    for entry in entries:
        value = zlib.crc32(entry.encode(), value)
    return value


def crosses_groups(entry: str) -> bool:
    """Return whether all ranks of a sharding group must submit this entry at the same place.

    [Note: unequal micro-batches] Gathers and reductions of a micro-batch connect only the ranks of
    a group of max(P, G) ranks. So these groups may take different numbers of micro-batches in a
    step. They meet once a step, when each unit's gradient and parameters cross them.
    """
    return not entry.startswith(_OF_MICRO_BATCHES)


class Submitted:
    """The record of submitted tasks."""

    def __init__(self) -> None:
        self.entries: list[str] = []  # "lane unit" of each task, until `drain`
        # The last (number, entry), from number 1: of all tasks, and of those that cross groups.
        self.recent = deque[tuple[int, str]](maxlen=LENGTH), deque[tuple[int, str]](maxlen=LENGTH)

    def add(self, entry: str) -> None:
        self.entries.append(entry)
        for record in self.recent if crosses_groups(entry) else self.recent[:1]:
            record.append((record[-1][0] + 1 if record else 1, entry))

    def drain(self) -> list[str]:
        entries, self.entries = self.entries, []
        return entries

    def shorten(self) -> None:
        """Fold the entries within groups into one if there are many.

        An evaluation may run any number of forwards without a comparison.
        """
        if len(self.entries) > _LONG_RECORD:
            crossing = [entry for entry in self.entries if crosses_groups(entry)]
            folded = f"gather of {len(self.entries)} with hash {hash_of(self.entries):08x}"
            self.entries = [*crossing, folded]


OnFailure = Callable[[CollectiveFailure, Callable[[float], bool]], None]
"""Handles the first failure, in the background thread that saw it. The second argument waits for a
number of seconds and returns whether the driver was closed."""


class CommReport(NamedTuple):
    """The communication of some steps."""

    exposed_ms: float | None  # per timed step, that computation waited; None without timed steps
    overlap_percent: float | None  # the part that computation did not wait for
    gathers_per_step: float  # of parameters, over all steps and units
    reductions_per_step: float  # of gradients, over all steps and units


class FailureContext:
    """A context that reports every error as a failure of `task`.

    Every task enters it, and contextlib's would take three times as long.
    """

    __slots__ = ("_driver", "_task")

    def __init__(self, driver: "Driver", task: Task):
        self._driver, self._task = driver, task

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self._driver.fail_task(self._task, error)
            self._driver.raise_failure()


class Driver:
    """Runs tasks; this class is the `inline` schedule: at once, on the calling thread."""

    def __init__(
        self, timeline: Timeline, limit_s: float = 600.0, on_failure: OnFailure | None = None
    ):
        self.timeline, self.device = timeline, timeline.device
        self.limit_s = limit_s  # for a collective
        self.in_graph = False  # tasks that are submitted now are captured
        self._streams: dict[str, Any] = {}  # by lane
        self.step = self.num_steps = 0  # the latest step that has begun
        self.submitted = Submitted()
        # Submitted tasks by lane; all ranks have the lanes in one order.
        self.counts = Counter[str](dict.fromkeys(LANES, 0))
        self._reported_steps, self._reported = 0, Counter[str]()  # at the last take_report
        self.latest: dict[str, Task] = {}  # the last submitted task of each lane
        self.last_task: Task | None = None  # of all lanes
        self._failure: Exception | None = None
        self._failing = threading.Lock()
        self._on_failure = on_failure
        self.roll_call: RollCall | None = None  # finds the missing ranks after a failure
        # Comparable ranks -> whether they submit all tasks in step, or only those across groups.
        self.compared: dict[int, bool] = {}
        self._num_seen, self._seen_s = 0, time.monotonic()
        self._main_was_told = threading.Event()  # the main thread has raised the failure
        self.registered = RegisteredMemory(self.device)  # of all arenas
        self.saves = SaveLog()  # for messages
        self._is_closed = threading.Event()
        # If the device runs ahead, the host waits for no collective: a thread checks the limit.
        self._watchdog = Watchdog(self.device, limit_s, self._fail_as_late, self._is_closed)
        self._prepare()

    def _prepare(self) -> None:
        """Make what the schedule has in addition; its threads may start here."""

    def begin_step(self, step: int) -> None:
        if step != self.step:
            self.step = step
            self.num_steps += 1
            self.timeline.begin_step(step)

    def take_report(self) -> CommReport:
        """Return the report of the steps since the last call; the current step must be over."""
        times, steps = self.timeline.pop_times(), max(1, self.num_steps - self._reported_steps)
        counts = self.counts - self._reported
        self._reported_steps, self._reported = self.num_steps, self.counts.copy()
        overlap = times.overlap
        return CommReport(
            exposed_ms=1e3 * times.exposed_s / times.steps if times.steps else None,
            overlap_percent=None if overlap is None else 100 * overlap,
            gathers_per_step=counts["gather"] / steps,
            reductions_per_step=counts["reduce"] / steps,
        )

    # ---- failures

    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        if self._failure is not None:
            if threading.current_thread() is threading.main_thread():
                self._main_was_told.set()
            raise self._failure

    def call_roll(self) -> None:
        """Ask other ranks after a failure or during a standstill. Collective over the world."""
        self.roll_call = RollCall.of_world(self)

    def fail(self, failure: Exception, suspect: tuple[Any, ...] | None = None) -> bool:
        """Make every submit and wait raise `failure`; return False if another was first.

        If a peer may be the cause, find_missing(*suspect) asks all ranks for some seconds.
        """
        with self._failing:
            if self._failure is not None:
                return False
            if suspect is not None and self.roll_call is not None:
                missing = self.roll_call.find_missing(*suspect)  # also tells the others
                if isinstance(failure, CollectiveFailure):
                    failure.add(missing)
            self._failure = failure
            return True

    def fail_task(self, task: Task, error: BaseException) -> bool:
        is_of_peer = isinstance(error, (RuntimeError, TimeoutError))
        suspect = (task.lane, task.number, ranks_along(task.axes))
        return self.fail(task.failure(error), suspect if is_of_peer else None)

    def fail_in_background(self, task: Task, error: BaseException) -> None:
        """Call `fail_task` in a background thread and report it; the main thread may be stuck."""
        self._report(self.fail_task(task, error))

    def fail_with_others(self, why: str = "") -> None:
        """Fail because another rank has called the roll: this rank would wait for it for ever.

        Runs in the roll call's thread, and waits a while first, because a failure of this rank's
        own says more. A caller with a reason `why` has asked all ranks already.
        """
        if self._is_closed.wait(OWN_FAILURE_FIRST_S):
            return
        error = RuntimeError(why or "another rank has failed")
        collective = collective_of_main_thread()
        title = self.saves.title(collective) if collective or self.is_writing() else None
        if collective is None and title is None and self.last_task is not None:
            title = (self._unfinished_task() or self.last_task).title
        title = title or f"{collective or 'what comes'} in step {self.step}"
        self._report(self.fail(CollectiveFailure.of(title, error), None if why else ()))

    # ---- [Note: apart], for the thread of the roll call

    def stalled_s(self) -> float:
        """Return the seconds since the last submit or first call; 0 if all tasks have ended."""
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
        """Return how far this rank is; once closed, it submits nothing more."""
        tasks, crossing = map(list, self.submitted.recent)
        collective = None if is_closed else collective_of_main_thread()
        task = self._unfinished_task() or self.last_task
        came = f"came last to the {task.title}" if task is not None else "has not called the model"
        doing = f"has closed, and {came}" if is_closed else came
        if collective is not None:
            doing = f"is in {collective.rstrip(',')}"
        calls = {} if is_closed else calls_of_main_thread()
        return Progress(tasks, crossing, calls, is_closed, doing)

    def is_writing(self) -> bool:
        """Return whether the main thread saves outside a collective; others may await its files."""
        return self.saves.current is not None and not is_main_thread_waiting()

    def _report(self, is_first: bool) -> None:
        failure = self._failure
        if not is_first or not isinstance(failure, CollectiveFailure):
            return
        if self._on_failure is not None:
            self._on_failure(failure, self._is_closed.wait)
        elif self.roll_call is not None:
            exit_if_main_thread_stuck(failure, self._main_was_told.wait)

    def _fail_as_late(self, task: Task) -> None:
        self.fail_in_background(task, TimeoutError(f"not finished after {self.limit_s:g} s"))

    # ---- tasks

    def await_event(self, event: Any) -> None:
        self.device.synchronize(event, self.limit_s, self.has_failed)
        self.raise_failure()

    def submit(self, task: Task) -> Task:
        """Run `task`, now or later; raise its failure, or that of an earlier task."""
        if self._failure is not None or self._is_closed.is_set():
            self.raise_failure()
            raise RuntimeError(
                f"{task.title}: submitted after close(). Use the model before its close()."
            )
        task.driver, task.step, task.in_graph = self, self.step, self.in_graph
        self.last_task = self.latest[task.lane] = task
        self.submitted.add(task.name)
        self.counts[task.lane] += 1
        task.number = self.counts[task.lane]
        self._start(task)
        return task

    def _start(self, task: Task) -> None:
        start = self.timeline.mark()
        with FailureContext(self, task):
            self.run(task)
        self.timeline.note(WAIT, task.name, start)

    def run(self, task: Task) -> None:
        if self.device.runs_ahead:
            self._watch(task)
        with profiler_range(task.name):
            task.issue()
            task.finish()

    def _watch(self, task: Task) -> None:
        if not task.in_graph:
            self._watchdog.watch(task.lane, task.has_ended, task)

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Make the tasks within a part of the CUDA graph that the main thread captures.

        [Note: tasks in a graph] All lanes join the capture and end in it. Only replays run such a
        task, and nothing may ask for an event of a capture: has_ended is true at once, and the time
        limit does not count.
        """
        fork, streams = self.device.record_event(), list(self._streams.values())
        for stream in streams:
            with self.device.on_stream(stream):
                self.device.wait_event(fork)
        self.timeline.pause()
        self.latest.clear()
        self.in_graph = True
        try:
            yield
            for stream in streams:
                with self.device.on_stream(stream):
                    end = self.device.record_event()
                self.device.wait_event(end)
        finally:
            self.in_graph = False
            self.latest.clear()

    def complete(self, task: Task) -> None:
        self.raise_failure()

    def close(self) -> None:
        """End everything; after a failure, raise it again without waiting."""
        self._is_closed.set()
        self._main_was_told.set()
        self._watchdog.close()
        if self.roll_call is not None:
            self.roll_call.close()
        limit_s = ABANDON_S if self.has_failed() else self.limit_s
        with suppress(TimeoutError):  # memory that some stream still uses stays registered
            self.registered.deregister(limit_s, self._watchdog)
        self.raise_failure()
