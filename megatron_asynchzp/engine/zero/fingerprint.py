# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the fingerprint of a tensor's bits, by which sent values are recognised."""

from functools import cache

import torch

_WORD = torch.int32
# Words at once: in the cache of a CPU; few kernels on a device.
_AT_ONCE = {"cpu": 1 << 14}
_AT_ONCE_ON_DEVICE = 1 << 18  # the weights permanently take 2 MiB
_FACTOR = -7046029254386353131  # 2^64 over the golden ratio, odd


@torch.no_grad()
def fingerprint(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fingerprint of the bits of `values`, cast to `dtype` first: 0-dim int64.

    It sums, modulo 2^64, each 32-bit word times a random 64-bit number of its place (Carter and
    Wegman, 1979): two different tensors agree with a probability below 2^-32. `values` is 1-D, of
    16 or 32 bits each, and a multiple of 4 bytes.
    """
    at_once = _AT_ONCE.get(values.device.type, _AT_ONCE_ON_DEVICE)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = _weights(at_once, values.device)
    width = at_once * _WORD.itemsize // (dtype or values.dtype).itemsize
    for index, start in enumerate(range(0, values.numel(), width)):
        piece = values[start : start + width]
        words = (piece if dtype is None else piece.to(dtype)).view(_WORD)
        part = (words * weights[: words.numel()]).sum()
        total.add_(part, alpha=_odd(index))
    return total


@cache
def _weights(num: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    with torch.inference_mode(False):
        return torch.randint(low, high, (num,), generator=random).to(device)


def forget_weights() -> None:
    _weights.cache_clear()


def _odd(index: int) -> int:
    mixed = (2 * index + 1) * _FACTOR % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
