# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns whether any rank of the world was asked to end its run (SIGTERM)."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure


class StopSignal:
    """A small all-reduce per step, in place of Megatron's all-gather and its wait for each rank.

    It goes over the world: the ranks of a pipeline or of a tensor-parallel group, which share no
    sharding group, save the same step too.

        host     ... norm of the gradients | share | updates ... | signals_received
        device   ... all-reduce of it      | all-reduce, copy | updates ...

    The norm has held the host, so the answer arrives before the updates and no rank waits for it.
    """

    def __init__(self, device: Device, limit_s: float):
        self._device, self._limit_s = device, limit_s
        self._answer: torch.Tensor | None = None  # on the host
        self._event: Any = None

    def share(self, device: torch.device) -> None:
        """Exchange signals with the world, in each step, if the run has a handler. Collective."""
        if (was_asked := _was_asked()) is None:
            return
        # Filled on the device: a copy from the host would hold it.
        flag = torch.full((1,), int(was_asked), dtype=torch.int32, device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # in the current stream, to which `flag` belongs
        if self._answer is None:
            self._answer = self._device.new_host_memory((1,), flag.dtype)
        self._answer.copy_(flag, non_blocking=True)
        self._event = self._device.record_event()

    def signals_received(self) -> list[bool]:
        """Return, in a list, whether any rank got the signal."""
        if self._answer is None:
            return [False]
        if not self._device.synchronize(self._event, self._limit_s):
            raise CollectiveFailure(
                f"all-reduce of the signal to end failed: not finished after {self._limit_s:g} s"
            )
        return [bool(self._answer[0])]


def _was_asked() -> bool | None:
    """Whether the signal came to this rank; None without --exit-signal-handler."""
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    handler = getattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", None)  # frameworks have no such module
    return None if handler is None else handler._signal_received
