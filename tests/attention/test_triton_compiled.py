# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernels compiled for sm_90, without a GPU: nothing is spilled to memory."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="needs triton: pip install megatron_asynchzp[triton]")

from tests.attention.sm90 import KERNELS, compile_for_sm90
from tests.support.selection import slow_unless

SHARED_BYTES = 227 * 1024  # of one block on sm_90


CASES = product([64, 96, 128, 256], ["fp16", "bf16"])


@pytest.mark.parametrize("dim, dtype", [slow_unless(one == (128, "fp16"), *one) for one in CASES])
@pytest.mark.parametrize("has_shift", [True, False], ids=["with shift", "without"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_spills_on_sm90_at_any_head_dimension(kernel, has_shift, dim, dtype):
    used = compile_for_sm90(kernel, dim, has_shift=has_shift, dtype=dtype)
    assert used.spilled_bytes == 0 and used.shared_bytes <= SHARED_BYTES, used
