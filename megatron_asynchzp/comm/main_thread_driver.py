# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the schedule in which the thread that computes issues all collectives early."""

from megatron_asynchzp.comm.driver import Driver, FailingAs, OnFailure
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.comm.timeline import LANES, Timeline, profiler_range


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
            if other in self._postponed and any(before.lane == task.lane for before in other.after):
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
        stream = self.device.on_stream(self._streams[task.lane])
        with FailingAs(self, task), stream, profiler_range(task.name):
            task.issue()
            if self.device.runs_ahead:
                task.issue_rest()
                if not task.is_on_its_way:
                    task.finish()
                self._watchdog.watch(task.lane, task.has_ended, task)

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
            stream = self.device.on_stream(self._streams[task.lane])
            with FailingAs(self, task), stream, profiler_range(f"wait for {task.name}"):
                task.finish(keeps_handle=self.device.runs_ahead)

    def close(self) -> None:
        try:
            for task in self._unfinished:
                task.await_usable()
        finally:
            super().close()
