# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a matrix unit rounds: products are summed in fp32 and rounded once. Emulated, so that it
is the same on every device.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of one way to compute attention.

    matrix: operands of matrix products (q, k, v, P, dO, dS).
    score: what QK^T is rounded to.
    vector: statistics and accumulators.
    """

    matrix: torch.dtype
    score: torch.dtype
    vector: torch.dtype


ALL_FP16 = Precision(torch.float16, torch.float16, torch.float16)
FP16_FP32_VECTOR = Precision(torch.float16, torch.float16, torch.float32)
FP32 = Precision(torch.float32, torch.float32, torch.float32)
FP64 = Precision(torch.float64, torch.float64, torch.float64)


def mixed_precision(matrix: torch.dtype) -> Precision:
    """Return the fused kernels' precision: operands in `matrix`, all else fp32 (fp64 for fp64)."""
    return FP64 if matrix == torch.float64 else Precision(matrix, torch.float32, torch.float32)


def gemm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a @ b, summed in fp32 (fp64 for fp64 operands), rounded once to `out_dtype`."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return (a.to(wide) @ b.to(wide)).to(out_dtype)
