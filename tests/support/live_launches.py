# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What this rank launches on NCCL, by torch's flight recorder."""

import pickle
from typing import Any

import torch

from scripts.launch_order.record import Launch, launches_in, num_recorded

BUFFER_SIZE = 4000
ENV = {"TORCH_FR_BUFFER_SIZE": str(BUFFER_SIZE)}
"""So many launches of a process are kept, the newest."""


class LaunchRecord:
    """The launches of this rank since it was made, or since they were last taken."""

    def __init__(self) -> None:
        self._num_taken = num_recorded(_dump())

    def take(self) -> list[Launch]:
        dump = _dump()
        num = num_recorded(dump) - self._num_taken
        assert num < BUFFER_SIZE, "more launches than torch keeps"
        self._num_taken += num
        return launches_in(dump, num)


def _dump() -> dict[str, Any]:
    return pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())  # pyright: ignore
