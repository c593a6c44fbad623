# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns when the collectives of a task run, on which stream, and how a failure of one reaches the
main thread.

A task is a generator that issues one collective after another (collectives.py, Steps). All
schedules run the same generators and differ only in which thread drives them:

    inline        the caller, to the end, at once
    main-thread   the caller issues early, and completes where the results are needed
    threaded      background threads (thread_driver.py), on a CPU

[Note: one total order] Two threads could launch collectives in an order that differs between
ranks, which can deadlock on NCCL. So where there are streams only the thread that computes
launches, whose program, Megatron's collectives included, is the same on every rank. A CPU has no
streams: there each lane's thread is one. It runs the lane's tasks in the order of submission, and
waits, as a stream would, for what they depend on.
"""

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_asynchzp.comm.collectives import AxisGroup, Last, Steps, ranks_along
from megatron_asynchzp.comm.timeline import LANES, WAIT, Timeline, profiler_range
from megatron_asynchzp.errors import name_ranks
from megatron_asynchzp.failure.last_line import end_where_main_stays
from megatron_asynchzp.failure.other_collective import (
    calls_of_main_thread,
    collective_of_main_thread,
    is_main_thread_waiting,
)
from megatron_asynchzp.failure.roll_call import OTHERS_FIRST_S, RollCall
from megatron_asynchzp.failure.saves import Saves
from megatron_asynchzp.failure.standstill import LENGTH, Progress
from megatron_asynchzp.failure.watchdog import Watchdog


def hash_of(entries: Iterable[str]) -> int:
    """Of what was submitted, in its order; the same in every process."""
    value = 0
    for entry in entries:
        value = zlib.crc32(entry.encode(), value)
    return value


def crosses_groups(entry: str) -> bool:
    """Whether all ranks of a sharding group must submit this at the same place.

    [Note: unequal micro-batches] What a micro-batch needs, gathers and reductions, connects the
    ranks of one group of max(P, G) ranks alone. So these groups may take different numbers of
    micro-batches in a step, and meet where each unit's gradient and parameters cross them, once a
    step.
    """
    return entry.partition(" ")[0] not in _OF_MICRO_BATCHES


class CollectiveFailure(RuntimeError):
    """A collective failed or took too long; the message names operation, unit, ranks and step, and,
    where a driver has somebody to ask, which ranks are missing."""

    @classmethod
    def of(cls, title: str, error: BaseException) -> "CollectiveFailure":
        """`error` as the one line about what has this title."""
        reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
        if any(words in reason for words in _PEER_ENDED):
            reason = f"a peer has ended ({reason})"
        if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
            reason = f"{type(error).__name__} {reason}".rstrip()
        failure = cls(f"{title} failed: {reason}")
        failure.__cause__ = error
        return failure

    def add(self, words: str) -> None:
        """To the message."""
        self.args = (f"{self}; {words}",)


def _no_steps() -> Steps:
    yield from ()
    return None


OnFailure = Callable[[CollectiveFailure, Callable[[float], bool]], None]
"""Called with the first failure in the background thread that saw it, which has nothing else to
do; the second argument waits for so many seconds and returns whether the driver was closed."""

_OF_MICRO_BATCHES = ("gather", "reduce")

# More entries than this are folded into one where the record is shortened.
_LONG_RECORD = 1000

# torch appends the C++ frames to some of its messages, behind these words.
_CPP_TRACE = "Exception raised from"

# How gloo and NCCL say that the process at the other end is gone.
_PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


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

    The driver sets the rest. step: which step it belongs to; number: of its lane's tasks, from 1;
    is_usable: the results exist or, on a
    stream, are on their way; event: after which they can be read, from then on, where something
    comes after its last collective; signal: set with is_usable, for other threads.
    """

    driver: "Driver"
    step = 0
    number = 0
    is_usable = False
    signal: threading.Event | None = None
    event: Any = None
    _steps: Steps | None = None
    _work: Any = None  # that must be complete before the next step
    _last: Last | None = None
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
        self.lane, self.unit, self.axes = lane, unit, axes
        self.start = start
        self.ready = ready
        self.after = [task for task in after if task is not None]

    @property
    def name(self) -> str:
        """Lane and unit, for traces and records."""
        return f"{self.lane} {self.unit}"

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
            self._last = end.value or Last()

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
        work, then = self._last or Last()
        if keeps_handle and work is not None and then is None and self._start_mark is None:
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
        self._last = Last()
        self.let_go()

    def order_stream(self) -> None:
        """What comes next in the current stream comes after this task, which is usable."""
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


class Driver:
    """Runs tasks. This one, `inline`, at once and on the calling thread.

    timeline: where tasks and waits are recorded.
    limit_s: seconds a collective may take.
    on_failure: see OnFailure.

    step: the latest that has begun.
    submitted: "lane unit" of each task, in order, until the comparison of orders takes it.
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
        self.submitted: list[str] = []
        self.counts = Counter[str](dict.fromkeys(LANES, 0))
        self.latest: dict[str, Task] = {}
        self.last_task: Task | None = None
        self._failure: Exception | None = None
        self._failing = threading.Lock()
        self._on_failure = on_failure
        self.roll_call: RollCall | None = None
        self.compared: dict[int, bool] = {}
        self._records = deque[tuple[int, str]](maxlen=LENGTH), deque[tuple[int, str]](maxlen=LENGTH)
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

    def fail(self, failure: Exception, asks: tuple[Any, ...] | None = None) -> bool:
        """From now on every submit and every wait raises `failure`. False: one came before it.

        asks: see RollCall.about, where a peer may be the cause: the ranks are called, which takes
            seconds. Whoever fails meanwhile waits for it.
        """
        with self._failing:
            if self._failure is not None:
                return False
            asked = None if asks is None or self.roll_call is None else self.roll_call.about(*asks)
            if asked is not None and isinstance(failure, CollectiveFailure):
                failure.add(asked)
            self._failure = failure
            return True

    @contextmanager
    def failing_as(self, task: Task) -> Generator[None]:
        """Any error within is a failure of `task`."""
        try:
            yield
        except Exception as error:
            self._fail_and_raise(task, error)

    def _fail_and_raise(self, task: Task, error: Exception) -> None:
        self.fail_task(task, error)
        self.raise_failure()

    def fail_task(self, task: Task, error: BaseException) -> bool:
        """As `fail`, for an error of `task`."""
        is_of_peer = isinstance(error, (RuntimeError, TimeoutError))
        asks = (task.lane, task.number, ranks_along(task.axes))
        return self.fail(task.failure(error), asks if is_of_peer else None)

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
        tasks, crossing = map(list, self._records)
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
        name = task.name
        self.submitted.append(name)
        self.counts[task.lane] += 1
        task.number = self.counts[task.lane]
        for record in self._records if crosses_groups(name) else self._records[:1]:
            record.append((record[-1][0] + 1 if record else 1, name))
        self._start(task)
        return task

    def shorten_record(self) -> None:
        """A forward of an evaluation begins, which may be any number of them without a comparison:
        fold what does not cross groups into one entry where it is long."""
        if len(self.submitted) > _LONG_RECORD:
            crossing = [entry for entry in self.submitted if crosses_groups(entry)]
            folded = f"gather of {len(self.submitted)} with hash {hash_of(self.submitted):08x}"
            self.submitted = [*crossing, folded]

    def _refuse(self, task: Task) -> None:
        self.raise_failure()
        raise RuntimeError(
            f"{task.title}: submitted after the communication was closed; use the "
            "model before its close()"
        )

    def _start(self, task: Task) -> None:
        start = self.timeline.mark()
        with self.failing_as(task):
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


class MainThreadDriver(Driver):
    """`main-thread`: the caller issues early and completes where results are needed. On a CPU the
    paper's baseline; on a device the default, with a stream for each lane.

    [Note: nothing behind a collective] CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands beside
    tensor or context parallelism, puts all streams into one queue of the device, and a wait holds
    up whatever the host issues behind it, computation included. So what needs a collective's end is
    put off until the results are needed. And a task that reads what is still on its way is issued
    when the next task of that lane is: it has had the computation of a unit to arrive.

        main         B u2 |             B u1 |             B u0 |
        reduce            | u2          |    | u1          |    | u0
        grad-sync                            wait, u2           | wait, u1

    All of it follows from the order of calls, so launches have one order on all ranks.
    """

    def __init__(
        self, timeline: Timeline, limit_s: float = 600.0, on_failure: OnFailure | None = None
    ):
        super().__init__(timeline, limit_s, on_failure)
        self._streams = {lane: self.device.new_stream() for lane in LANES}
        self._unfinished: list[Task] = []
        self._postponed: set[Task] = set()

    def _start(self, task: Task) -> None:
        if self.device.runs_ahead:
            self._complete_older(task.lane)
        for other in self._unfinished:
            is_due = any(before.lane == task.lane for before in other.after)
            if is_due and other in self._postponed:
                self._issue(other)
        is_held_up = any(other.lane == task.lane for other in self._postponed)
        self._unfinished.append(task)
        self._postponed.add(task)
        if not is_held_up and all(other.is_usable for other in task.after):
            self._issue(task)
        self._unfinished = [other for other in self._unfinished if not other.is_usable]

    def _complete_older(self, lane: str) -> None:
        """At most one task of a lane is left unfinished beside the next one: the rest has had the
        time of a unit, and its memory would grow."""
        of_lane = [other for other in self._unfinished if other.lane == lane]
        if len(of_lane) > 1:
            self.complete(of_lane[-2])

    def _issue(self, task: Task) -> None:
        """Complete what `task` reads, then issue its first collective; on a device all of them.
        Those before it in its lane come first."""
        for other in self._unfinished[: self._unfinished.index(task)]:
            if other.lane == task.lane and other in self._postponed:
                self._issue(other)
        self._postponed.discard(task)
        for other in task.after:
            if self.device.runs_ahead:
                self.complete(other)
            else:
                other.wait()
        with self._attending(task, task.name):
            task.issue()
            if self.device.runs_ahead:
                task.issue_rest()
                if not task.is_on_its_way:
                    task.finish()
                self._watchdog.watch(task.lane, task.has_ended, task)

    @contextmanager
    def _attending(self, task: Task, title: str) -> Generator[None]:
        stream = self.device.on_stream(self._streams[task.lane])
        with self.failing_as(task), stream, profiler_range(title):
            yield

    def complete(self, task: Task) -> None:
        """Every task before it in its lane is completed first: a caller that waits for the last
        reduction of a unit wants the results of all of them."""
        self.raise_failure()
        if task.is_usable:
            return
        for other in self._unfinished[: self._unfinished.index(task)]:
            if other.lane == task.lane:
                other.await_usable()
        if task in self._postponed:
            self._issue(task)
        if not task.is_usable:
            with self._attending(task, f"wait for {task.name}"):
                task.finish(keeps_handle=self.device.runs_ahead)

    def close(self) -> None:
        try:
            for task in self._unfinished:
                task.await_usable()
        finally:
            super().close()
