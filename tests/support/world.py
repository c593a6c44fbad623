# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One way to run a test body on several ranks, whoever starts them: pytest alone (ranks are
forked, see ranks.py) or `torchrun --nproc-per-node N -m pytest` (pytest itself runs on each rank).
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.ranks import run_ranks


def on_ranks(fn: Callable, world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks; return what each returned, in rank order.

    Under torchrun the body runs in the processes that are there, every rank gets the whole list
    and asserts on it, and the test is skipped when torchrun started another number of ranks.
    `options` (`timeout_s`, `env`) are those of `run_ranks`; torchrun has its own.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return run_ranks(fn, world_size, *args, **options)
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {started}")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, fn(*args))
    return results
