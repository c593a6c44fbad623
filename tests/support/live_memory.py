# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of all tensors alive in this process, each storage once."""

import gc

import torch


def live_nbytes() -> int:
    gc.collect()
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # isinstance is slow on a million
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
