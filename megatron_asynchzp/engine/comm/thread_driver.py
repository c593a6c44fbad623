# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule of a CPU in which background threads run tasks."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_asynchzp.engine.comm.driver import Driver, OnFailure
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES, Timeline
from megatron_asynchzp.engine.failure.collective_failure import CollectiveFailure

# After a failure wait no longer for the threads: a call of the backend may never return.
_ABANDON_S = 5.0
# The main thread waits longer than the limit, because a lane's message is more exact.
_MARGIN_S = 1.0


class ThreadDriver(Driver):
    """The schedule `threaded`: a background thread for each lane.

    main      submit ... compute ... wait
    a lane        issue, complete | issue, complete
    """

    def __init__(
        self,
        timeline: Timeline,
        limit_s: float = 600.0,
        on_failure: OnFailure | None = None,
        delay: Callable[[], float] | None = None,  # seconds to sleep before a task, for tests
    ):
        super().__init__(timeline, limit_s, on_failure)
        self._delay = delay
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
        deadline = time.monotonic() + (_ABANDON_S if self.has_failed() else self.limit_s)
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        super().close()

    # ---- the background threads

    def _loop(self, tasks: "queue.SimpleQueue[Task | None]") -> None:
        while (task := tasks.get()) is not None:
            if self._delay is not None:
                time.sleep(self._delay())
            try:
                if not self.has_failed():
                    for source in task.after:
                        source.await_usable()
                    self.run(task)
                    with self._lock:
                        self._unfinished.pop(task, None)
            except BaseException as error:  # the main thread raises it when it waits
                self.fail_in_background(task, error)
