# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the grids of Transformer Engine's FP8 and FP4 formats in torch operations."""

from typing import NamedTuple

import torch
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FP32_MAX = torch.finfo(torch.float32).max


class Grid(NamedTuple):
    """Blocks of rows x columns of a matrix that share a scale; None: all of them.

    kind: fp32 scales, powers of two in fp32, or the 8 bits of an exponent (E8M0).
    """

    rows: int | None
    columns: int | None
    kind: str = "fp32"


class Coded(NamedTuple):
    """A matrix in codes.

    `codes`: [M, K] uint8; `inverse`: the factor of the codes of each block, fp32, or its exponent,
    uint8.
    """

    codes: torch.Tensor
    inverse: torch.Tensor


def scale_of(amax: torch.Tensor, top: float, is_power: bool, epsilon: float = 0.0) -> torch.Tensor:
    """What values of the largest magnitude `amax` (fp32) are multiplied with before the cast.

    Source: common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    raised = amax.clamp_min(epsilon)
    # torch would multiply a number with the reciprocal, and round twice.
    scale = (torch.full_like(raised, top) / raised).clamp_max(_FP32_MAX)
    if is_power:  # the mantissa's bits are cleared
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    is_plain = torch.isfinite(raised) & (raised > 0)
    return torch.where(is_plain, scale, torch.ones_like(scale))


def exponent_of(amax: torch.Tensor, top: float) -> torch.Tensor:
    """The biased exponent (E8M0) of the smallest power of two that is at least amax / top.

    Source: common/util/ptx.cuh, float_to_e8m0: rounds up, and never below 2**-127.
    """
    bits = (amax * torch.tensor(1.0 / top, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    is_above = (mantissa > 0) & (exponent != 0xFE)
    is_above &= ~((exponent == 0) & (mantissa <= 0x400000))
    found = torch.where(exponent == 0xFF, 0xFE + (mantissa > 0).int(), exponent + is_above.int())
    return found.to(torch.uint8)


def power_of(exponent: torch.Tensor) -> torch.Tensor:
    """The fp32 number of a biased exponent."""
    return torch.exp2(exponent.float() - 127)


def amax_of_blocks(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Largest magnitude of each block of a matrix, fp32; NaN where one is in it."""
    rows, columns = grid.rows or len(x), grid.columns or x.shape[1]
    tall, wide = -(-len(x) // rows), -(-x.shape[1] // columns)
    padding = (0, wide * columns - x.shape[1], 0, tall * rows - len(x))
    padded = functional.pad(x.float().abs(), padding)
    return padded.view(tall, rows, wide, columns).amax((1, 3))


def spread(of_blocks: torch.Tensor, grid: Grid, shape: torch.Size) -> torch.Tensor:
    """One number for each block -> one for each element of [M, K]."""
    rows, columns = grid.rows or shape[0], grid.columns or shape[1]
    tall = of_blocks.repeat_interleave(rows, 0)[: shape[0]]
    return tall.repeat_interleave(columns, 1)[:, : shape[1]]


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of x * scale: rounded to the nearest, ties to even, beyond the largest the largest."""
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype).view(torch.uint8)


def encode(x: torch.Tensor, grid: Grid, dtype: torch.dtype, epsilon: float = 0.0) -> Coded:
    """Codes of a matrix [M, K] with scales of its own blocks."""
    top, amax = torch.finfo(dtype).max, amax_of_blocks(x, grid)
    if grid.kind == "e8m0":
        inverse = exponent_of(amax, top)
        scale = power_of(254 - inverse.int())  # common/util/ptx.cuh, exp2f_rcp
    else:
        scale = scale_of(amax, top, grid.kind == "power", epsilon)
        inverse = 1 / scale
    return Coded(cast(x, spread(scale, grid, x.shape), dtype), inverse)


def decode(coded: Coded, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """The values of a matrix of codes, fp32 [M, K]."""
    inverse = power_of(coded.inverse) if grid.kind == "e8m0" else coded.inverse
    return coded.codes.view(dtype).float() * spread(inverse, grid, coded.codes.shape)


# ---- NVFP4: values of E2M1 in blocks of 16 with scales in E4M3, and a scale of the whole tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TOP, _E4M3_TOP, BLOCK = 6.0, 448.0, 16


def e2m1_of(x: torch.Tensor, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """Return the codes of fp32 values, 4 bits in uint8.

    They are the nearest, ties to even, beyond the largest the largest; with `uniform` in [0, 1) one
    of the two neighbours, the nearer one more often.
    """
    magnitude = x.abs().clamp_max(_E2M1_TOP)
    values = torch.tensor(E2M1_VALUES, device=x.device)
    if uniform is None:
        middles = (values[1:] + values[:-1]) / 2
        below, above = (torch.bucketize(magnitude, middles, right=up) for up in (False, True))
        code = torch.where(below % 2 == 0, below, above)
    else:
        low = (torch.bucketize(magnitude, values, right=True) - 1).clamp_max(len(values) - 2)
        share = (magnitude - values[low]) / (values[low + 1] - values[low])
        code = low + (uniform < share)
    return (code + 8 * x.signbit()).to(torch.uint8)


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale of a whole matrix.

    Source: pytorch/custom_recipes/quantization_ref_nvfp4.py, _quantize_blockwise_reference, as what
    follows.
    """
    scale = (torch.full_like(amax, _E4M3_TOP * _E2M1_TOP) / amax).clamp_max(_FP32_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def encode_fp4(
    x: torch.Tensor, amax: torch.Tensor, rows: int, uniform: torch.Tensor | None = None
) -> Coded:
    """Codes of a matrix [M, K], two in a byte, in blocks of `rows` x 16; amax: of all of it."""
    whole = global_scale(amax)
    of_blocks = amax_of_blocks(x, Grid(rows, BLOCK)).repeat_interleave(rows, 0)[: len(x)]
    sixth = torch.reciprocal(torch.tensor(_E2M1_TOP, device=x.device))
    inverse = (of_blocks * (whole * sixth)).clamp_max(_E4M3_TOP).to(E4M3)
    scale = (1 / (inverse.float() * (1 / whole))).clamp_max(_FP32_MAX)
    codes = e2m1_of(x.float() * spread(scale, Grid(1, BLOCK), x.shape), uniform)
    return Coded(codes[:, ::2] + 16 * codes[:, 1::2], inverse)


def decode_fp4(coded: Coded, amax: torch.Tensor) -> torch.Tensor:
    """The values of a matrix of codes, fp32 [M, K]."""
    codes = torch.stack((coded.codes % 16, coded.codes // 16), -1).flatten(1).long()
    values = torch.tensor([*E2M1_VALUES, *(-one for one in E2M1_VALUES)], device=codes.device)
    scales = spread(coded.inverse.float(), Grid(1, BLOCK), codes.shape)
    return values[codes] * scales / global_scale(amax)
