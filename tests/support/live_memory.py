# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of all tensors alive in this process, each byte once."""

import gc

import torch


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
