# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the communication of some steps cost, in numbers for a log."""

from collections import Counter
from typing import NamedTuple

from megatron_asynchzp.comm.driver import Driver


class CommReport(NamedTuple):
    """Communication of some steps: milliseconds per step that computation waited for it, and in %
    the part that it did not wait for, of the steps that were timed, None where none was; gathers of
    parameters and reductions of gradients per step, of all steps and units."""

    exposed_ms: float | None
    overlap_percent: float | None
    gathers_per_step: float
    reductions_per_step: float


class CommReports:
    """The reports of one driver, each of the steps since the one before."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._reported_steps, self._reported = 0, Counter[str]()

    def take(self) -> CommReport:
        """Called when a step is over."""
        driver = self._driver
        times = driver.timeline.take_times()
        steps = max(1, driver.num_steps - self._reported_steps)
        counts = driver.counts - self._reported
        self._reported_steps, self._reported = driver.num_steps, driver.counts.copy()
        overlap = times.overlap
        return CommReport(
            exposed_ms=1e3 * times.exposed_s / times.steps if times.steps else None,
            overlap_percent=None if overlap is None else 100 * overlap,
            gathers_per_step=counts["gather"] / steps,
            reductions_per_step=counts["reduce"] / steps,
        )
