# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fills memory in flight with NaN as soon as it is free.

A read that comes too late, or before the next write, gives NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_asynchzp.engine.comm.arena import Arena
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.sharding.memory_map import Extent


@contextmanager
def poisoned_places() -> Iterator[None]:
    """While this lasts every place that is released is filled with NaN."""
    release = Arena.release

    @torch.no_grad()
    def poison_and_release(self: Arena, extent: Extent, last_user: Any = None) -> None:
        memory = self.bytes_at(extent)
        device = device_of(memory)
        # The caller's event is before what fills it: its last reader is at rest then.
        device.wait_event(last_user)
        memory.fill_(0xFF)  # NaN in every floating dtype
        release(self, extent, device.record_event())

    with mock.patch.object(Arena, "release", poison_and_release):
        yield
