# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a schedule's options, for the flags, the engine and the planner. Needs no torch."""

from dataclasses import dataclass

SCHEDULES = ("inline", "main-thread", "threaded")
ON_STREAMS = ("inline", "main-thread")
"""Those of a device with streams. There the host waits for no collective, so that a second thread
gains nothing, and its launches would come in any order among those of other libraries."""
NOT_ON_STREAMS = "is for a CPU; leave it out, or take main-thread: a device has streams of its own"
AUTO = "auto"
"""The schedule of the device: main-thread where there are streams, else threaded."""
DEFAULT_GRAD_SLOT_NBYTES = 256 * 2**20
EARLY_UPDATES = (AUTO, "on", "off")


@dataclass(frozen=True)
class ScheduleConfig:
    """How collectives are driven."""

    kind: str = AUTO  # one of SCHEDULES, or AUTO
    prefetch_depth: int = 1  # units of each size gathered ahead of the one that computes
    # limit for gathered parameters and for gradients in reduction, together, of a model chunk; None
    # for as many as two layers of each size need
    in_flight_nbytes: int | None = None
    # a unit's gradients that are larger than this in fp32 are reduced in pieces of at most this
    # size
    grad_slot_nbytes: int = DEFAULT_GRAD_SLOT_NBYTES
    time_limit_s: float = 600.0  # a collective that takes longer is an error
    checks_order: bool = True  # compare the ranks' orders once per step
    timed_every: int = 10  # see Timeline
    # further bytes on a rank for parameters that stay gathered from one micro-batch to a later one
    keep_params_nbytes: int = 0
    # further bytes on a rank for gradients that are accumulated across micro-batches
    keep_grads_nbytes: int = 0
    # kept parameters also get the device memory left after the first update
    keeps_params_in_free_memory: bool = False
    # one of EARLY_UPDATES: whether units are sent before the norm of all gradients is known
    # (zero/early_update.py): as many as backward has room for while steps are not clipped, all of
    # them, or none
    early_update: str = AUTO
    # register memory in flight with NCCL for groups within so many consecutive ranks, those that
    # NVLink joins; 0: do not
    registers_memory: int = 0
    registers_windows: bool = True  # for symmetric kernels; else plainly

    def __post_init__(self) -> None:
        if self.kind not in (AUTO, *SCHEDULES):
            raise ValueError(f"schedule {self.kind!r} is not one of {', '.join(SCHEDULES)}")
        if self.early_update not in EARLY_UPDATES:
            raise ValueError(
                f"early update {self.early_update!r} is not one of {', '.join(EARLY_UPDATES)}"
            )
        if self.prefetch_depth < 0:
            raise ValueError("the prefetch depth must be at least 0")
        if self.keep_params_nbytes < 0 or self.keep_grads_nbytes < 0:
            raise ValueError("memory that is kept must be at least 0 bytes")

    @property
    def is_inline(self) -> bool:
        """Whether collectives never overlap with the computation."""
        return self.kind == "inline"

    @property
    def may_send_early(self) -> bool:
        """Whether units may be sent before the update; if inline, only on request."""
        return self.early_update == "on" or (self.early_update == AUTO and not self.is_inline)

    @property
    def depth(self) -> int:
        """Units gathered ahead; none if inline."""
        return 0 if self.is_inline else self.prefetch_depth
