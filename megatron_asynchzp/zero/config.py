# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what can be chosen about a schedule, and the driver that a choice stands for."""

from dataclasses import dataclass

from megatron_asynchzp.comm.driver import Driver, MainThreadDriver, OnFailure, StreamDriver
from megatron_asynchzp.comm.thread_driver import ThreadDriver
from megatron_asynchzp.comm.timeline import Timeline
from megatron_asynchzp.device import Device

SCHEDULES = ("inline", "main-thread", "threaded")
AUTO = "auto"
"""The schedule of the device: main-thread on CUDA, whose other collectives must keep one order with
ours, and threaded elsewhere."""


@dataclass(frozen=True)
class ScheduleConfig:
    """How collectives are driven.

    kind: one of SCHEDULES, or AUTO; prefetch_depth: units of each size gathered ahead of the one
    that computes; param_slots: full parameters of equal units in memory, 0 for as many as the depth
    can use; grad_slots: full gradients of equal units in flight; time_limit_s: after which a
    collective that has not finished is an error; checks_order: compare the ranks' orders once per
    step; timed_every: see Timeline.
    """

    kind: str = AUTO
    prefetch_depth: int = 1
    param_slots: int = 0
    grad_slots: int = 2
    time_limit_s: float = 600.0
    checks_order: bool = True
    timed_every: int = 10

    def __post_init__(self) -> None:
        if self.kind not in (AUTO, *SCHEDULES):
            raise ValueError(f"schedule {self.kind!r} is not one of {', '.join(SCHEDULES)}")
        if self.prefetch_depth < 0 or self.param_slots < 0 or self.grad_slots < 1:
            raise ValueError(
                "prefetch depth and parameter slots must be at least 0, gradient slots at least 1"
            )

    @property
    def depth(self) -> int:
        """Units gathered ahead: none where nothing runs beside the computation."""
        return 0 if self.kind == "inline" else self.prefetch_depth

    def kind_on(self, device: Device) -> str:
        """Which of SCHEDULES runs on `device`."""
        if self.kind != AUTO:
            return self.kind
        return "main-thread" if device.is_cuda else "threaded"

    def start_driver(self, device: Device, on_failure: OnFailure | None = None) -> Driver:
        """A driver of this kind, with a timeline of its own. on_failure: for background threads."""
        new_driver: type[Driver] = {
            "inline": Driver,
            "main-thread": StreamDriver if device.runs_ahead else MainThreadDriver,
            "threaded": ThreadDriver,
        }[self.kind_on(device)]
        return new_driver(Timeline(device, self.timed_every), self.time_limit_s, on_failure)
