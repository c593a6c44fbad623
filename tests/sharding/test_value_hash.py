# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Values that are not the same bits at the same places have another hash."""

from itertools import permutations

import pytest
import torch

from megatron_asynchzp.engine.sharding import value_hash as module

CPU = torch.device("cpu")


def hashed(*tensors: torch.Tensor) -> int:
    return int(module.value_hash(tensors, CPU))


@pytest.fixture(params=[4, module._AT_ONCE], ids=["blocks of 4", "one block"])
def blocks(request, monkeypatch):
    """However many blocks a tensor has."""
    monkeypatch.setattr(module, "_AT_ONCE", request.param)


DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.complex64, torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_value_changes_its_hash(dtype: torch.dtype, blocks):
    chance = torch.Generator().manual_seed(0)
    values = (torch.rand(9, generator=chance) * 100).to(dtype)
    hashes = {hashed(values)}
    for cut in range(10):
        assert hashes == {hashed(values[:cut], values[cut:])}
    raw = values.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            hashes.add(hashed(values))
            raw[place] ^= 1 << bit
    assert len(hashes) == 1 + 8 * raw.numel()


def test_values_that_are_the_same_in_another_order_have_another_hash(blocks):
    rows = torch.eye(5)
    matrices = [rows[list(order)] for order in permutations(range(5))]
    assert len({hashed(matrix) for matrix in matrices}) == len(matrices)
    assert len({hashed(matrix.bool()) for matrix in matrices}) == len(matrices)
    # The same sum, and the same sum of value times place.
    one, other = torch.tensor([1.0, 2.0, 2.0, 1.0]), torch.tensor([2.0, 1.0, 1.0, 2.0])
    assert hashed(one) != hashed(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_changes_that_cancel_in_a_sum_change_the_hash(dtype: torch.dtype, blocks):
    values = torch.arange(1.0, 9.0).to(dtype)
    hashes = {hashed(values)}
    for first in range(8):
        for second in range(first):
            flipped = values.clone()
            flipped[[first, second]] *= -1
            hashes.add(hashed(flipped))
    assert len(hashes) == 1 + 8 * 7 // 2


def test_zeros_of_either_sign_and_nans_of_other_bits_are_other_values(blocks):
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert hashed(torch.zeros(1)) != hashed(-torch.zeros(1))
    assert hashed(nans[:1]) != hashed(nans[1:])


def test_a_hash_is_that_of_the_elements_whatever_their_strides():
    values = torch.arange(12.0).view(3, 4)
    assert hashed(values.t()) == hashed(values.t().contiguous()) != hashed(values)
    conjugate = torch.complex(values, values).conj()
    assert hashed(conjugate) == hashed(conjugate.resolve_conj())
