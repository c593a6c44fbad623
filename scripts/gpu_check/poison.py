# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fills memory in flight with NaN as soon as it is free: whoever reads it too late, or before it is
written again, computes NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_asynchzp.comm.ring import BufferRings, Slot
from megatron_asynchzp.device import device_of


@contextmanager
def poisoned_slots() -> Iterator[None]:
    """While this lasts every slot that is given back is filled with NaN."""
    release = BufferRings.release

    @torch.no_grad()
    def poisoning_release(self: BufferRings, user: Any, slot: Slot, free_event: Any = None) -> None:
        device = device_of(slot.storage)
        # The caller's event is before what fills it: its last reader is at rest then.
        device.wait_event(free_event)
        for tensor in (slot.storage, *slot.scratch):
            tensor.fill_(float("nan"))
        release(self, user, slot, device.record_event())

    with mock.patch.object(BufferRings, "release", poisoning_release):
        yield
