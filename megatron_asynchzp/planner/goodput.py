# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the cost of failures: the part of its time in which a run trains, and how often to save.

A failure may come at any moment, and throws the run back to its last complete checkpoint. That is
Daly's model (Future Generation Computer Systems 22, 2006), with saves in the background: such a
checkpoint is complete a while after the step that it holds.
"""

from dataclasses import dataclass
from math import exp, expm1


@dataclass(frozen=True)
class Failures:
    """Failures and saves, as a cluster's file states them."""

    mtbf_hours: float  # between failures of a node that end a run
    restart_s: float  # from a failure until the ranks train again
    copy_gb_s: float  # of a rank to host memory; --async-save holds training up for that alone
    save_gb_s: float  # of a node that writes a checkpoint

    def saves(self, nbytes: float, nodes: int, ranks: int, is_async: bool) -> "SaveTimes":
        """Return the times of saves of `nbytes` in all, for a run on `nodes` with `ranks`."""
        written_s = nbytes / (1e9 * self.save_gb_s * nodes)
        copied_s = nbytes / (1e9 * self.copy_gb_s * ranks) if is_async else 0.0
        held_s = copied_s if is_async else written_s
        return SaveTimes(
            3600 * self.mtbf_hours / nodes, self.restart_s, held_s, copied_s + written_s
        )


@dataclass(frozen=True)
class SaveTimes:
    """The times of a run's failures and saves, in seconds."""

    mtbf_s: float  # between failures of the run
    restart_s: float  # until it trains again; a failure within it starts it anew
    held_s: float  # a save holds training up
    complete_s: float  # from a save's begin until a run could begin from it

    def goodput(self, interval_s: float) -> float:
        """Return the part of all time whose training counts, for `interval_s` between saves.

        From one complete checkpoint to the next a run needs interval + held without a failure, and
        interval + complete after a restart. A save waits for the previous one.
        """
        mean_s, held_s = self.mtbf_s, max(self.held_s, self.complete_s - interval_s)
        survives = exp(-(interval_s + self.complete_s + self.restart_s) / mean_s)
        return interval_s * survives / (mean_s * -expm1(-(interval_s + held_s) / mean_s))

    @property
    def best_interval_s(self) -> float:
        """Return the interval of the best `goodput`."""
        # Its derivative is 0 at t = M (1 - exp(-(t + held) / M)), to first order Young's sqrt(2 M
        # held); the previous save must be complete.
        low, high = 0.0, self.mtbf_s
        for _ in range(60):
            middle = (low + high) / 2
            if middle < -self.mtbf_s * expm1(-(middle + self.held_s) / self.mtbf_s):
                low = middle
            else:
                high = middle
        return max(low, self.complete_s - self.held_s)

    def best_steps(self, step_s: float) -> int:
        fewest = max(1, int(self.best_interval_s / step_s))
        return max(fewest, fewest + 1, key=lambda steps: self.goodput(steps * step_s))
