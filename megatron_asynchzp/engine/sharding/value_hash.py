# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The hashes by which ranks compare the values of tensors, and recognise values that were sent."""

from collections.abc import Iterable
from functools import cache

import torch

_AT_ONCE = 1 << 18  # elements
# Not int64: times any odd number its highest bit gives 2^63, so two such changes would cancel.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_GOLDEN = -7046029254386353131  # 2^64 over the golden ratio, odd
_MIXERS = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))  # SplitMix64's


@torch.no_grad()
def value_hash(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the hash (0-dim, int64, on `device`) of the bits of strided `tensors`, in order.

    Each tensor is hashed on its own device. The hash is the sum, modulo 2^64, of each element's
    bits times an odd pseudo-random number. It changes with any single element and, up to chance,
    with several: swapped rows, and changes that cancel in a plain sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    place, odd = 0, torch.empty(0)
    for tensor in tensors:
        flat = _bits(tensor)
        if (
            odd.numel() < min(_AT_ONCE, place % _AT_ONCE + flat.numel())
            or odd.device != flat.device
        ):
            odd = _odd_numbers(place % _AT_ONCE + flat.numel(), flat.device)
        start = 0
        while start < flat.numel():
            block, offset = divmod(place, _AT_ONCE)
            bits = flat[start : start + _AT_ONCE - offset]
            sums = (bits * odd[offset : offset + bits.numel()]).sum()
            power = _signed(pow(_GOLDEN, block, 1 << 64))  # odd, as the others
            total += (sums * power).to(device)
            start, place = start + bits.numel(), place + bits.numel()
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


def _odd_numbers(num: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1, min(num, _AT_ONCE) + 1, device=device).mul_(_GOLDEN)
    for shift, factor in _MIXERS:
        high = numbers >> shift
        numbers.bitwise_xor_(high.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return numbers.bitwise_or_(1)


_WORD = torch.int32
# Words at once: in the cache of a CPU; few kernels on a device.
_WORDS_ON_CPU = 1 << 14
_WORDS_ON_DEVICE = 1 << 18  # the weights permanently take 2 MiB


@torch.no_grad()
def fingerprint(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fingerprint of the bits of `values`, cast to `dtype` first: 0-dim int64.

    It sums, modulo 2^64, each 32-bit word times a random 64-bit number of its place (Carter and
    Wegman, 1979): two different tensors agree with a probability below 2^-32. `values` is 1-D, of
    16 or 32 bits each, and a multiple of 4 bytes.
    """
    at_once = _WORDS_ON_CPU if values.device.type == "cpu" else _WORDS_ON_DEVICE
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = _weights(at_once, values.device)
    width = at_once * _WORD.itemsize // (dtype or values.dtype).itemsize
    for index, start in enumerate(range(0, values.numel(), width)):
        piece = values[start : start + width]
        words = (piece if dtype is None else piece.to(dtype)).view(_WORD)
        part = (words * weights[: words.numel()]).sum()
        total.add_(part, alpha=_signed((2 * index + 1) * _GOLDEN % 2**64))
    return total


@cache
def _weights(num: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    with torch.inference_mode(False):
        return torch.randint(low, high, (num,), generator=random).to(device)


def forget_weights() -> None:
    _weights.cache_clear()


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
