# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint differs where a bit does, or a place."""

import pytest
import torch

from megatron_asynchzp.engine.sharding import value_hash as hashes
from megatron_asynchzp.engine.sharding.value_hash import fingerprint

NUMEL = 96


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a tensor has several pieces, the last of which is not whole."""
    monkeypatch.setattr(hashes, "_WORDS_ON_CPU", 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_and_every_exchange_of_two_values_is_seen(dtype: torch.dtype):
    torch.manual_seed(0)
    values = torch.randn(NUMEL).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    first = int(fingerprint(values))
    assert int(fingerprint(values.clone())) == first
    seen = {first}
    changes = 0
    for index in range(NUMEL):
        for bit in range(0, 8 * dtype.itemsize, 5):
            other = values.clone()
            other.view(bits)[index] ^= 1 << bit
            seen.add(int(fingerprint(other)))
            changes += 1
    for one in range(NUMEL - 1):
        for distance in (1, 2, 20, 40):
            if (two := one + distance) < NUMEL and values[one] != values[two]:
                other = values.clone()
                other[one], other[two] = values[two], values[one]
                seen.add(int(fingerprint(other)))
                changes += 1
    assert len(seen) == changes + 1


def test_signs_that_turn_together_are_seen():
    values = torch.randn(NUMEL)
    for stride in (1, 2, 20, 48):
        other = values.clone()
        other[::stride] *= -1
        assert int(fingerprint(other)) != int(fingerprint(values))
    assert int(fingerprint(torch.zeros(8))) != int(fingerprint(-torch.zeros(8)))


def test_values_are_cast_first():
    values = torch.randn(NUMEL)
    cast = fingerprint(values.to(torch.bfloat16))
    assert int(fingerprint(values, torch.bfloat16)) == int(cast) != int(fingerprint(values))
