# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernels and the delegate on a device, in both 16-bit dtypes."""

import pytest
import torch

from megatron_asynchzp.attention.mask import AttentionMask
from scripts.testbed.attention.paper_data import Inputs, relative_rmse
from tests.attention.cases import exact, growth_of_dq_error, masks
from tests.attention.interpreted import attend
from tests.attention.test_delegate import through_autograd
from tests.attention.test_triton import biased

pytestmark = pytest.mark.gpu

MASKS = {name: mask for name, mask in masks(300, 700).items() if mask.allowed is None}
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _on_device(inputs: Inputs) -> Inputs:
    return Inputs(*(x.cuda() for x in inputs))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_the_kernels_are_as_accurate_as_the_reference(name, dim, dtype):
    mask = MASKS[name]
    inputs = biased(mask, dtype, heads=4, groups=2, dim=dim)
    found = attend(_on_device(inputs), mask, dim**-0.5, is_fused=True)
    for one, true in zip(found, exact(inputs, mask, dim**-0.5), strict=True):
        one = one.cpu()
        assert torch.equal(one.isneginf(), true.isneginf())
        one, true = (x.masked_fill(x.isneginf(), 0) for x in (one, true))
        assert relative_rmse(one, true) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("way", ["block", "delegate"])
def test_dq_does_not_depend_on_the_bias_of_k(way, dtype):
    mask = AttentionMask(1024, 1024, is_causal=True)

    def dq_of(inputs: Inputs, scale: float) -> torch.Tensor:
        if way == "block":
            return attend(_on_device(inputs), mask, scale, is_fused=True)[2].cpu()
        return through_autograd(_on_device(inputs), mask, scale)[1].cpu()

    assert growth_of_dq_error(dq_of, mask, dtype, dim=128, heads=4, groups=2) <= 1.5
