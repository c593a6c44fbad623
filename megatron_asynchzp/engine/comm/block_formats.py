# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the number formats of weights in layers that compute in FP8 or FP4.

    format                     block                    code     level of a block, in bytes
    Float8CurrentScaling       the weight               1 byte   largest magnitude, 4
    Float8BlockScaling         128 x 128, 1 x 128       1 byte   largest magnitude, 4
    MXFP8 (OCP MX)             32 x 1, 1 x 32, 32 x 32  1 byte   exponent E8M0, 1
    NVFP4 (Transformer Engine) 16 x 16, 16 x 1, 1 x 16  1/2 byte scale E4M3, 1

[Note: codes that come back] A layer quantises the weight that it finds. Of a weight that was
encoded and decoded here it makes the codes and the scales of the original, because the largest
magnitude of a block keeps its scale (tests compare all bf16 magnitudes).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, override

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_FP8_MAX, _FP4_MAX, _FP32_MAX = 448.0, 6.0, torch.finfo(torch.float32).max


class Blocks(NamedTuple):
    """The blocks of some elements, 1-D, of a weight."""

    levels: Tensor  # of `level_dtype`
    whole: Tensor  # the largest magnitude of the weight; 0 if the format does not need it
    spread: Callable[[Tensor], Tensor]  # to each element the value of its block


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A code for each element of a weight, and a level for each block of rows x columns.

    The level tells a block's scale and grows with its largest magnitude, so ranks that share a
    block take the largest of their levels.
    """

    rows: int | None = None  # of a block; None: the whole weight, of any shape, is one block
    columns: int | None = None
    level_dtype: ClassVar[torch.dtype] = torch.uint8
    codes_per_byte: ClassVar[int] = 1
    needs_whole: ClassVar[bool] = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether layers take a weight of this shape."""
        side = max(self.rows or 1, self.columns or 1)
        return len(shape) == 2 and all(size % side == 0 for size in shape)

    @abstractmethod
    def levels(self, amax: Tensor, whole: Tensor) -> Tensor:
        """Return the levels of blocks from their largest magnitudes (fp32)."""

    @abstractmethod
    def encode(self, values: Tensor, blocks: Blocks) -> Tensor:
        """Return the codes of bf16 values, uint8."""

    def factors(self, levels: Tensor, wholes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `decode` takes of each block and of each weight."""
        return levels, wholes

    @abstractmethod
    def decode(self, codes: Tensor, factors: Tensor, whole: Tensor, out: Tensor) -> None:
        """Write the values of codes by the factors of each element's block."""


@dataclass(frozen=True)
class ScaledFp8(BlockFormat):
    """An fp32 scale: Transformer Engine's Float8CurrentScaling and Float8BlockScaling.

    The level is the largest magnitude. A block with a value that is not finite becomes NaN.
    """

    is_power: bool = False  # whether scales are powers of two
    epsilon: float = 0.0  # lower bound of the largest magnitude
    level_dtype = torch.float32

    @override
    def fits(self, shape: Sequence[int]) -> bool:
        return self.rows is None or len(shape) == 2

    @override
    def levels(self, amax: Tensor, whole: Tensor) -> Tensor:
        return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # not every maximum keeps a NaN

    def _scales(self, amax: Tensor) -> Tensor:
        """Return the layers' scales (recipe_common.cuh, compute_scale_from_amax)."""
        raised = amax.clamp_min(self.epsilon)
        scale = (torch.full_like(raised, _FP8_MAX) / raised).clamp_max(_FP32_MAX)
        if self.is_power:  # clear the mantissa
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        return scale

    @override
    def encode(self, values: Tensor, blocks: Blocks) -> Tensor:
        return (values * blocks.spread(self._scales(blocks.levels))).to(FP8).view(torch.uint8)

    @override
    def factors(self, levels: Tensor, wholes: Tensor) -> tuple[Tensor, Tensor]:
        return 1 / self._scales(levels), wholes

    @override
    def decode(self, codes: Tensor, factors: Tensor, whole: Tensor, out: Tensor) -> None:
        torch.mul(codes.view(FP8).float(), factors, out=out)


class Mxfp8(BlockFormat):
    """A power of two for 32 elements of a row, of a column, or for 32 x 32; level: its exponent."""

    @override
    def levels(self, amax: Tensor, whole: Tensor) -> Tensor:
        """Return the layers' exponents (ptx.cuh, float_to_e8m0)."""
        bits = (amax * torch.full_like(amax, 1 / _FP8_MAX)).view(torch.int32)
        exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
        rises = (mantissa > 0) & (exponent != 0xFE) & ((exponent > 0) | (mantissa > 0x400000))
        exponent = torch.where(exponent == 0xFF, 0xFE + (mantissa > 0).int(), exponent + rises)
        return exponent.to(torch.uint8)

    @override
    def encode(self, values: Tensor, blocks: Blocks) -> Tensor:
        scaled = values * blocks.spread(_power_of_two(254 - blocks.levels))
        return scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8)

    @override
    def decode(self, codes: Tensor, factors: Tensor, whole: Tensor, out: Tensor) -> None:
        values = codes.view(FP8).float()
        # Of 224 the layer would take half the scale, of 225, which has the same code, this one.
        values = torch.where(values.abs() == 224, values * (225 / 224), values)
        torch.mul(values, _power_of_two(factors), out=out)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return the fp32 numbers of biased exponents, uint8; 255, which is its own inverse, is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()


class Nvfp4(BlockFormat):
    """E2M1 codes in blocks of 16 x 16, or of 16 elements of a row or a column.

    The level is a block's scale in E4M3, relative to a scale of the whole weight.
    """

    codes_per_byte = 2
    needs_whole = True

    @override
    def levels(self, amax: Tensor, whole: Tensor) -> Tensor:
        sixth = torch.reciprocal(torch.full_like(whole, _FP4_MAX))
        scaled = (amax * (_whole_scale(whole) * sixth)).clamp_max(_FP8_MAX)
        return scaled.to(FP8).view(torch.uint8)

    @override
    def encode(self, values: Tensor, blocks: Blocks) -> Tensor:
        inverse = blocks.levels.view(FP8).float() * (1 / _whole_scale(blocks.whole))
        scaled = values * blocks.spread((1 / inverse).clamp_max(_FP32_MAX))
        # 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties go to even codes. A table would be copied from the host.
        magnitude = scaled.abs().clamp_max(_FP4_MAX)
        codes = torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round() + 4)
        codes = torch.where(magnitude < 2, (2 * magnitude).round(), codes) + 8 * scaled.signbit()
        return (codes[::2] + 16 * codes[1::2]).to(torch.uint8)

    @override
    def factors(self, levels: Tensor, wholes: Tensor) -> tuple[Tensor, Tensor]:
        finite = torch.where(wholes.isfinite(), wholes, torch.nan)
        return levels.view(FP8).float(), _whole_scale(finite)

    @override
    def decode(self, codes: Tensor, factors: Tensor, whole: Tensor, out: Tensor) -> None:
        pairs = torch.stack((codes & 15, codes >> 4), -1).view(-1).int()
        magnitudes = pairs & 7
        # Of a largest 3 or 4 the layer would take another one of the least scales.
        raised = 0.25 * ((factors == 2.0**-9) & (magnitudes == 5))
        raised += 0.75 * ((factors == 2.0**-8) & (magnitudes == 6))
        in_fp8 = torch.where(magnitudes < 2, 48 * magnitudes, 48 + 4 * magnitudes).to(torch.uint8)
        values = (in_fp8.view(FP8).float() + raised) * (1 - 2 * (pairs >> 3))
        torch.div(values * factors, whole, out=out)


def _whole_scale(amax: Tensor) -> Tensor:
    scale = (torch.full_like(amax, _FP8_MAX * _FP4_MAX) / amax).clamp_max(_FP32_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)
