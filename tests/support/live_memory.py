# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of all tensors alive in this process, each byte once; and those that torch's
allocator gives out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_asynchzp.engine.sharding.value_hash import forget_weights
from scripts.testbed.memory import MemoryCount, install_memory_count


@contextmanager
def counted_allocations() -> Iterator[MemoryCount]:
    """Torch's allocator counts; skips the test where there is no compiler for that."""
    count = install_memory_count()
    if count is None:
        pytest.skip("no compiler")
    try:
        # Nothing of other tests goes while this one counts.
        gc.collect()
        forget_weights()
        yield count
    finally:
        count.uninstall()


def live_nbytes() -> int:
    gc.collect()
    ends: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # isinstance is slow on a million
            storage = thing.untyped_storage()
            start = storage.data_ptr()
            ends[start] = max(ends.get(start, 0), start + storage.nbytes())
    total = last = 0
    for start, end in sorted(ends.items()):  # some storages are parts of others
        total += max(0, end - max(start, last))
        last = max(last, end)
    return total
