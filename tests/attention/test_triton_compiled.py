# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernels compiled for three generations of GPUs, without one: nothing is spilled."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="needs triton: pip install megatron_asynchzp[triton]")

from scripts.testbed.attention.compiled import KERNELS, compiled
from tests.support.selection import slow_unless

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of one block

CASES = product([64, 96, 128, 256], ["fp16", "bf16"], SHARED_BYTES)


@pytest.mark.parametrize(
    "dim, dtype, sm", [slow_unless(one == (128, "fp16", 90), *one) for one in CASES]
)
@pytest.mark.parametrize("has_shift", [True, False], ids=["with shift", "without"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_spills_at_any_head_dimension(kernel, has_shift, dim, dtype, sm):
    used = compiled(kernel, dim, sm=sm, has_shift=has_shift, dtype=dtype)
    assert used.spilled_bytes == 0 and used.shared_bytes <= SHARED_BYTES[sm], used
