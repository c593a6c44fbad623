# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule in which the computing thread issues all collectives early."""

from megatron_asynchzp.engine.comm.driver import Driver, FailureContext, OnFailure
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES, Timeline, profiler_range


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
            task.issue()
            if self.device.runs_ahead:
                task.issue_rest()
                if not task.is_on_its_way:
                    task.finish()
                self._watchdog.watch(task.lane, task.has_ended, task)

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

    def close(self) -> None:
        try:
            for task in self._unfinished:
                task.await_usable()
        finally:
            super().close()
