# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs in resonance or with garbage in their padding, every mask there is, what the oracle gives,
and errors. Knows no implementation."""

from collections.abc import Callable

import torch

from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from scripts.testbed.attention.exact import exact_backward, exact_forward
from scripts.testbed.attention.paper_data import Inputs, normal_inputs, relative_rmse


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
    real = torch.tensor([keys // 2])
    one_padded = PackedSequences(cumulative(queries), cumulative(keys), lengths_k=real)
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
        "packed causal, more queries": AttentionMask(
            keys,
            keys,
            is_causal=True,
            packed=PackedSequences(cumulative(second, first), cumulative(first, second)),
        ),
        "packed, padded": AttentionMask(keys, keys, is_causal=True, packed=padded),
        "padding": AttentionMask(queries, keys, packed=one_padded),
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


def exact(inputs: Inputs, mask: AttentionMask, scale: float) -> list[torch.Tensor]:
    """O, LSE, dQ, dK, dV of softmax attention."""
    q, k, v, d_output = inputs
    return [*exact_forward(q, k, v, mask, scale), *exact_backward(d_output, q, k, v, mask, scale)]


def with_garbage(clean: Inputs, mask: AttentionMask, garbage: float) -> Inputs:
    """In every key and value that no query may attend."""
    is_padding = ~mask.used_keys_BT()[0]
    assert is_padding.any() and not is_padding.all()
    dirty = clean._replace(k=clean.k.clone(), v=clean.v.clone())
    dirty.k[:, :, is_padding] = dirty.v[:, :, is_padding] = garbage
    return dirty


def growth_of_dq_error(
    dq_of: Callable[[Inputs, float], torch.Tensor],
    mask: AttentionMask,
    dtype: torch.dtype,
    **sizes: int,
) -> float:
    """By how much a bias of 30 in all keys multiplies the relative error of dQ. dq_of: of inputs
    and a scale."""
    drawn, error = normal_inputs(mask, **sizes), []
    for bias in (0.0, 30.0):
        inputs = drawn._replace(k=drawn.k + bias).to(dtype)
        scale = inputs.q.shape[-1] ** -0.5
        error.append(relative_rmse(dq_of(inputs, scale), exact(inputs, mask, scale)[2]))
    return error[1] / error[0]
