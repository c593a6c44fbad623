# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the optimizer of every contender, torch's fused AdamW, and what its steps take.

Where Megatron finds neither Transformer Engine nor apex, which is so on CPUs, it builds torch's
AdamW unfused, a loop over parameters that takes several times as long. On a device every contender
would have a fused one.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_asynchzp.engine.zero.unit import HZPUnit

_TORCHS = (torch.optim.Adam, torch.optim.AdamW)


def new_adamw(
    params: Iterable[torch.nn.Parameter], learning_rate: float = 1e-3
) -> torch.optim.Optimizer:
    """For a contender that brings no optimizer of its own."""
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.0, fused=True)


def owned_params(unit: HZPUnit) -> list[torch.nn.Parameter]:
    """Return the main parameters of `unit` that this rank holds, each with its `grad`."""
    owned = [one for one in unit.new_fragments() if one.held.numel]
    for one in owned:
        one.param.grad = one.grad
    return [one.param for one in owned]


class FusedAdam:
    """Makes every torch Adam of the process fused, and measures the steps of optimizers."""

    def __init__(self):
        self.seconds = 0.0
        self._begins_s: list[float] = []  # of steps that have begun: an optimizer may wrap others
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    def remove(self) -> None:
        """Leave other optimizers alone."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) in _TORCHS:
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
        self._begins_s.append(time.perf_counter())

    def _end(self, *_: Any) -> None:
        begin_s = self._begins_s.pop()
        if not self._begins_s:
            self.seconds += time.perf_counter() - begin_s
