# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the most memory that a program holds at once, without that of the stand-in's functions."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_KIND = "requested_bytes.all"


class Peak:
    """Counts while it is the active one.

    `nbytes`: the most that was requested of the device's allocator at once outside of functions
    that are `as_a_kernel`, their results included.
    """

    counting: "Peak | None" = None

    def __init__(self):
        self.nbytes, self._is_within = 0, False

    def __enter__(self) -> "Peak":
        torch.cuda.reset_peak_memory_stats()
        Peak.counting = self
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        Peak.counting = None

    def _note(self) -> None:
        self.nbytes = max(self.nbytes, torch.cuda.memory_stats()[f"{_KIND}.peak"])

    def around(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, whose own memory does not count."""
        if self._is_within:
            return call()
        self._note()
        self._is_within = True
        try:
            return call()
        finally:
            self._is_within = False
            torch.cuda.reset_peak_memory_stats()


def as_a_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which stands for a kernel: what it takes for itself counts in no Peak."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if Peak.counting is None:
            return function(*args, **kwargs)
        return Peak.counting.around(lambda: function(*args, **kwargs))

    return call
