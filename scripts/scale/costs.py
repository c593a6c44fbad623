# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one cost at one number of ranks, and how a process of its own is measured."""

import gc
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.testbed.memory import resident_nbytes


class Cost(NamedTuple):
    """phase: "start", "step", "save", "load", "failure" or "restart".
    what: the cost and whose it is; unit: "s", "MB" or "".
    is_measured: `now`, at this number of ranks; computed otherwise.
    """

    phase: str
    what: str
    unit: str
    now: float
    is_measured: bool = True


class Used(NamedTuple):
    """By a call: its result, CPU seconds of the process, and MB that it left in memory."""

    result: Any
    cpu_s: float
    mb: float


def use(call: Callable[[], Any]) -> Used:
    gc.collect()
    before, start = resident_nbytes(), time.process_time()
    result = call()
    return Used(result, time.process_time() - start, (resident_nbytes() - before) / 1e6)


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function` in a process of its own, whose memory is its own too."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)
