# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs in resonance, every mask there is, and the largest error. Knows no implementation."""

import torch

from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from scripts.testbed.attention.paper_data import Inputs, normal_inputs


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


def largest_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Largest absolute difference; infinities must be at the same places, and NaN never."""
    assert torch.equal(found.isneginf(), true.isneginf())
    assert not found.isnan().any()
    return (found.double() - true.double()).masked_fill(true.isneginf(), 0).abs().max().item()
