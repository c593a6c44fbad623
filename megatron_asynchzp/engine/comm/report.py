# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Summarises the cost of communication in some steps, for a log."""

from collections import Counter
from typing import NamedTuple

from megatron_asynchzp.engine.comm.driver import Driver


class CommReport(NamedTuple):
    """The communication of some steps."""

    exposed_ms: float | None  # per timed step, that computation waited; None without timed steps
    overlap_percent: float | None  # the part that computation did not wait for
    gathers_per_step: float  # of parameters, over all steps and units
    reductions_per_step: float  # of gradients, over all steps and units


class CommReports:
    """Makes the reports of a driver."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._reported_steps, self._reported = 0, Counter[str]()

    def next_report(self) -> CommReport:
        """Return the report of the steps since the last call; the current step must be over."""
        driver = self._driver
        times = driver.timeline.pop_times()
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
