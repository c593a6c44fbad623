# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of the attention tests (the paper's data, its resonance, biased keys), every mask there
is, and how errors are measured. Knows no implementation."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_output: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(x.to(dtype) for x in self))


def normal_inputs(
    mask: AttentionMask, *, batch=1, heads=2, groups=1, dim=32, value_dim=None, seed=0
) -> Inputs:
    """Standard normal q, k, v, dO in fp64."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, value_dim = mask.num_queries, mask.num_keys, value_dim or dim
    # fmt: off
    shapes = [(heads, queries, dim), (groups, keys, dim), (groups, keys, value_dim),
              (heads, queries, value_dim)]
    # fmt: on
    return Inputs(
        *(torch.randn(batch, *s, generator=generator, dtype=torch.float64) for s in shapes)
    )


@dataclass(frozen=True)
class PaperData:
    """The paper's benchmark law, the same for q, k and v.

    uniform: x0 + Am U(-1, 1); hybrid: N(x0, 1) + N(0, Am) Bernoulli(0.001).
    """

    law: str
    x0: float
    amplitude: float

    def draw(self, length: int, *, heads=2, groups=1, dim=128, seed=0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, n, length, dim) for n in (heads, groups, groups)]
        drawn = [self._sample(shape, generator) for shape in shapes]
        return Inputs(*drawn, torch.randn(1, heads, length, dim, generator=generator).double())

    def _sample(self, shape, generator) -> torch.Tensor:
        if self.law == "uniform":
            return self.x0 + self.amplitude * (
                2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
            )
        base, outlier = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        is_outlier = torch.rand(shape, generator=generator) < 0.001
        return self.x0 + base + self.amplitude * outlier * is_outlier


PAPER_GRID = [
    PaperData(law, x0, amplitude)
    for law in ("uniform", "hybrid")
    for x0 in (0, 10, 20, 30)
    for amplitude in (0.5, 5, 10, 20)
]


def resonant_inputs(sign: int, length: int, *, size=40.0, dim=128, seed=0) -> Inputs:
    """q and k in phase (sign 1) or 180 degrees out (-1) along the head dimension: a wave that all
    tokens share, which multiplies |QK|, and noise of one."""
    noise = normal_inputs(AttentionMask(length, length), dim=dim, seed=seed)
    wave = size * torch.cos(torch.arange(dim, dtype=torch.float64) * 0.7)
    return Inputs(noise.q + wave, noise.k + sign * wave, noise.v, noise.d_output)


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def masks(queries: int = 70, keys: int = 90) -> dict[str, AttentionMask]:
    """Every kind of mask, on lengths that no block size divides."""
    first, second = keys // 3, keys - keys // 3
    packed = PackedSequences(cumulative(first, second), cumulative(first, second))
    padded = PackedSequences(
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        torch.tensor([first - 4, second - 7]),
        torch.tensor([first - 4, second - 7]),
    )
    generator = torch.Generator().manual_seed(5)
    return {
        "full": AttentionMask(queries, keys),
        "causal": AttentionMask(keys, keys, is_causal=True),
        "causal, fewer queries": AttentionMask(queries, keys, is_causal=True),
        "causal, more queries": AttentionMask(keys, queries, is_causal=True),
        "window": AttentionMask(keys, keys, window=(17, 9)),
        "causal window": AttentionMask(keys, keys, is_causal=True, window=(20, -1)),
        "packed": AttentionMask(keys, keys, packed=packed),
        "packed causal": AttentionMask(keys, keys, is_causal=True, packed=packed),
        "packed, padded": AttentionMask(keys, keys, is_causal=True, packed=padded),
        "padding": AttentionMask(queries, keys, key_lengths_B=torch.tensor([keys // 2])),
        "chunks": AttentionMask(
            2 * (keys // 4),
            keys,
            is_causal=True,
            chunks=((keys // 4, keys // 4), (keys // 4, keys)),
        ),
        "arbitrary": AttentionMask(
            queries, keys, allowed=torch.rand(1, 1, queries, keys, generator=generator) < 0.5
        ),
    }


def relative_rmse(found: torch.Tensor, true: torch.Tensor) -> float:
    """RMS of the error over the RMS of the truth."""
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def largest_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Largest absolute difference; infinities must be at the same places, and NaN never."""
    assert torch.equal(found.isneginf(), true.isneginf())
    assert not found.isnan().any()
    return (found.double() - true.double()).masked_fill(true.isneginf(), 0).abs().max().item()
