# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The hash by which ranks compare the values of tensors without sending them."""

from collections.abc import Iterable

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
            power = pow(_GOLDEN, block, 1 << 64)  # odd, as the others
            total += (sums * (power - (power >> 63 << 64))).to(device)
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
