# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures steps on one rank: times, bytes on the network, tensor memory."""

import gc
import time
from collections.abc import Callable

from scripts.testbed.contenders.adam import FusedAdam
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.counters import total
from scripts.testbed.cpu_usage import machine_cpu_s, own_cpu_s
from scripts.testbed.fabric import lane
from scripts.testbed.fabric.network import Network
from scripts.testbed.fabric.streams import host_waits
from scripts.testbed.memory import install_memory_count


class StepMeter:
    """Measures each step from its begin to the begin of the next.

    The last step is not measured, so that the work that a step leaves in flight is part of some
    measured step.
    """

    def __init__(
        self,
        network: Network,
        workload: Workload,
        take_exposed_s: Callable[[], float] = lambda: 0.0,
    ):
        """Start measuring.

        `take_exposed_s`: returns the seconds since its last call for which the main thread waited
        for threads of its own, which in turn wait for the network.
        """
        self._network, self._workload, self._take_exposed_s = network, workload, take_exposed_s
        self._begins_s: list[float] = []
        self._memory = install_memory_count()
        self._adam = FusedAdam()
        self.report = RankReport()

    @property
    def num_steps(self) -> int:
        """Begun so far."""
        return len(self._begins_s)

    def begin_step(self) -> None:
        """On the main thread, before each step."""
        step = self.num_steps
        if step == self._workload.warm_up:
            self._begin_measuring()
        if step == self._workload.warm_up + self._workload.steps:
            self._end_measuring()
        self._begins_s.append(time.perf_counter())

    def add_loss(self, loss: float | None) -> None:
        """Mean over the global batch; None on a rank that has none."""
        self.report.losses.append(loss)

    def _begin_measuring(self) -> None:
        gc.collect()
        gc.freeze()  # a collection in the middle of a step would be noise
        if self._memory is not None:
            self.report.state_nbytes = self._memory.live_nbytes
            self._memory.reset_peak()
        self._bytes = self._network.counters.snapshot()
        self._waits, self._blocked_s = host_waits(), lane.blocked_s()
        self._take_exposed_s()
        self._optimizer_s = self._adam.seconds
        self._cpu_s = own_cpu_s(), machine_cpu_s()

    def _end_measuring(self) -> None:
        report, steps = self.report, self._workload.steps
        begins = [*self._begins_s[self._workload.warm_up :], time.perf_counter()]
        report.step_s = [after - before for before, after in zip(begins, begins[1:])]
        report.wall_s = begins[-1] - begins[0]
        report.node_nbytes = total(self._network.counters.since(self._bytes).values()).node_nbytes
        waited_s = lane.blocked_s() - self._blocked_s + self._take_exposed_s()
        report.exposed_s = waited_s / steps
        report.optimizer_s = (self._adam.seconds - self._optimizer_s) / steps
        report.host_waits = host_waits() - self._waits
        report.own_cpu_s = own_cpu_s() - self._cpu_s[0]
        report.machine_cpu_s = machine_cpu_s() - self._cpu_s[1]
        if self._memory is not None and report.state_nbytes is not None:
            report.peak_nbytes = self._memory.peak_nbytes
            report.state_nbytes = min(report.state_nbytes, self._memory.live_nbytes)
