# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a unit's collectives are asked for: one task per collective, with the step it belongs
to. Must not know why or in which order.
"""

from collections.abc import Callable, Sequence

from megatron_asynchzp.comm.collectives import AxisGroup
from megatron_asynchzp.comm.driver import Driver, Job
from megatron_asynchzp.comm.task import Steps, Task
from megatron_asynchzp.zero.unit import HZPUnit


class UnitTasks:
    """Hands the tasks of units to a driver. step: counted by whoever knows when one begins."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.device = driver.timeline.device
        self.step = 0
        self._ranks: dict[tuple[str, HZPUnit], tuple[int, ...]] = {}

    def submit(
        self,
        lane: str,
        unit: HZPUnit,
        axes: Sequence[AxisGroup],
        start: Callable[[], Steps],
        after: Sequence[Job | None] = (),
        ready: Sequence[object] = (),
    ) -> Job:
        """axes: those that the unit's tasks of this lane go over; the rest is as in Task."""
        key = lane, unit
        if key not in self._ranks:
            self._ranks[key] = unit.groups.ranks_along(axes)
        jobs = tuple(job for job in after if job is not None)
        return self.driver.submit(
            Task(lane, unit.name, self._ranks[key], self.step, start, tuple(ready), jobs)
        )
