# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One way to run a test body on several ranks: pytest alone forks them (run_ranks), or
`torchrun --nproc-per-node N -m pytest` runs pytest itself on each rank.
"""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from scripts.testbed.ranks import RankFailure, run_ranks


def on_ranks(fn: Callable, world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks; return what each returned, in rank order.

    Under torchrun the body runs in the processes that are there, every rank gets the whole list
    and asserts on it, and the test is skipped when torchrun started another number of ranks.
    `options` (`timeout_s`, `env`) are those of `run_ranks`; torchrun has its own.

    Raises RankFailure on every rank when `fn` raised on one.
    """
    if not is_torchrun():
        return run_ranks(fn, world_size, *args, **options)
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {started}")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    try:
        mine: tuple[bool, Any] = (True, fn(*args))
    except Exception:
        mine = (False, traceback.format_exc())
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, mine)
    if errors := {rank: text for rank, (is_ok, text) in enumerate(results) if not is_ok}:
        raise RankFailure(errors)
    return [value for _, value in results]


def is_torchrun() -> bool:
    """Whether this pytest process is itself one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
