# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fills memory in flight with NaN as soon as it is free: a read that comes too late, or before the
next write, gives NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_asynchzp.comm.arena import Arena, Place
from megatron_asynchzp.device import device_of


@contextmanager
def poisoned_places() -> Iterator[None]:
    """While this lasts every place that is given back is filled with NaN."""
    release = Arena.release

    @torch.no_grad()
    def poisoning_release(self: Arena, place: Place, last_user: Any = None) -> None:
        device = device_of(place.storage)
        # The caller's event is before what fills it: its last reader is at rest then.
        device.wait_event(last_user)
        place.storage.fill_(float("nan"))
        release(self, place, device.record_event())

    with mock.patch.object(Arena, "release", poisoning_release):
        yield
