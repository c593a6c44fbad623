# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the published arithmetic of PASA (arXiv 2503.01873, its algorithm and block sizes).

For comparison: the mean of a block's scores is recovered from the scores themselves.

    M  = scale (I - beta/n J)     K'_j = (K_j^T M)^T            once per key head and block
    S' = Q K'_j^T                 mu_j = rowmean(S')            over all keys, before the mask
    m_j = rowmax(S')              P = exp(S' - m_j)             l_j = rowsum(P)
    F_new = mu_j/(j+1) + F_old j/(j+1)                          running pseudo-average
    dc = Inv (mu_j - F_new)       dp = Inv (F_old - F_new)      Inv = beta/(1-beta)
    m_new = max(m_j + dc, m + dp)
    l, O: old part x exp(m + dp - m_new), new part x exp(m_j + dc - m_new)
    LSE = m + log l + Inv F_last

One deviation: m_j + dc and m + dp are formed once and used for the maximum and for the exponents.
The published (m_j - m_new) + dc may be positive by a rounding, and its exponential overflow. The
paper has no backward; the one here is the derivative of S = S' + Inv mu_j in this arithmetic.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_asynchzp.attention.call import (
    AttentionGradients,
    AttentionOutput,
    fold_heads,
    unfold_heads,
)
from megatron_asynchzp.attention.key_shift import BLOCK_SIZE, zero_unused
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.reference.block import gemm
from scripts.testbed.attention.shifting import recovery_factor, shifting_matrix

# Where the running maximum starts, and what a masked score is: the paper's, near fp16's lowest.
LOWEST = -60000.0


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
FP64 = Precision(torch.float64, torch.float64, torch.float64)


class PaperForward(NamedTuple):
    """The result, and what the backward needs: LSE and pseudo-average of the last block's frame."""

    result: AttentionOutput
    shifted_lse_BHS: torch.Tensor
    pseudo_average_BHS: torch.Tensor


class _Block(NamedTuple):
    keys: slice
    k_BGnD: torch.Tensor
    score_BGNn: torch.Tensor
    mean_BGN: torch.Tensor
    allowed_B1Nn: torch.Tensor


def paper_forward(
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
    beta: float,
    precision: Precision = ALL_FP16,
    block_size: int = BLOCK_SIZE,
) -> PaperForward:
    """The algorithm above. `precision`: ALL_FP16 or FP16_FP32_VECTOR are the paper's two."""
    heads, vector, inv = q_BHSD.shape[1], precision.vector, recovery_factor(beta)
    k_BGTD, v_BGTE = _real_keys(k_BGTD, v_BGTE, mask)
    q_BGND = fold_heads(q_BHSD, k_BGTD.shape[1]).to(precision.matrix)
    maximum = q_BGND.new_full(q_BGND.shape[:-1], LOWEST, dtype=vector)
    total, average = torch.zeros_like(maximum), torch.zeros_like(maximum)
    output = q_BGND.new_zeros(*q_BGND.shape[:-1], v_BGTE.shape[-1], dtype=vector)
    blocks = _blocks(q_BGND, k_BGTD, mask, scale, beta, precision, block_size)
    for j, block in enumerate(blocks):
        score = block.score_BGNn.masked_fill(~block.allowed_B1Nn, LOWEST)
        block_maximum = score.amax(-1)
        p = (score - block_maximum[..., None]).exp()
        p = p.masked_fill(~block.allowed_B1Nn, 0)  # a row whose keys are all masked has exp(0)
        new_average = block.mean_BGN / (j + 1) + average * (j / (j + 1))
        new = block_maximum + inv * (block.mean_BGN - new_average)
        old = maximum + inv * (average - new_average)
        maximum = torch.maximum(new, old).clamp(min=LOWEST)
        keep, add = (old - maximum).exp(), (new - maximum).exp()
        total = total * keep + p.sum(-1, dtype=vector) * add
        pv = gemm(p.to(precision.matrix), v_BGTE[:, :, block.keys].to(precision.matrix), vector)
        output = output * keep[..., None] + pv * add[..., None]
        average = new_average
    output_BGNE = output / total.masked_fill(total == 0, 1)[..., None]
    lse_BGN = torch.where(total == 0, -torch.inf, maximum + total.log())
    result = AttentionOutput(output_BGNE.to(q_BHSD.dtype), lse_BGN + inv * average)
    return PaperForward(
        AttentionOutput(*(unfold_heads(x, heads) for x in result)),
        unfold_heads(lse_BGN, heads),
        unfold_heads(average, heads),
    )


def paper_backward(
    d_output_BHSE: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTE: torch.Tensor,
    forward: PaperForward,
    mask: AttentionMask,
    scale: float,
    beta: float,
    precision: Precision = ALL_FP16,
    block_size: int = BLOCK_SIZE,
) -> AttentionGradients:
    """Return the gradients in the published frame.

    P = exp(S' + Inv (mu_j - F_last) - L), and as S = Q (K'_j + Inv mean(K'_j))^T, dQ = sum_j [ dS_j
    K'_j + Inv r_j mean(K'_j) ].
    """
    groups, heads, vector = k_BGTD.shape[1], q_BHSD.shape[1], precision.vector
    inv = recovery_factor(beta)
    k_BGTD, v_BGTE = _real_keys(k_BGTD, v_BGTE, mask)
    q_BGND = fold_heads(q_BHSD, groups).to(precision.matrix)
    d_output = fold_heads(d_output_BHSE, groups).to(precision.matrix)
    output = fold_heads(forward.result.output_BHSE, groups)
    delta_BGN1 = (d_output.to(vector) * output.to(vector)).sum(-1, dtype=vector, keepdim=True)
    lse = fold_heads(forward.shifted_lse_BHS, groups)
    lse = lse.masked_fill(lse.isneginf(), 0)
    average = fold_heads(forward.pseudo_average_BHS, groups)
    dq = torch.zeros_like(q_BGND, dtype=vector)
    dk, dv = (torch.zeros_like(x, dtype=vector) for x in (k_BGTD, v_BGTE))
    for block in _blocks(q_BGND, k_BGTD, mask, scale, beta, precision, block_size):
        offset_BGN = inv * (block.mean_BGN - average) - lse
        p = (block.score_BGNn + offset_BGN[..., None]).masked_fill(~block.allowed_B1Nn, -torch.inf)
        p = p.exp()
        dp = gemm(d_output, v_BGTE[:, :, block.keys].to(precision.matrix).mT, vector)
        ds = (p * (dp - delta_BGN1)).to(precision.matrix)
        r_BGN1 = ds.to(vector).sum(-1, dtype=vector, keepdim=True)
        mean_BG1D = block.k_BGnD.to(vector).mean(2, keepdim=True)
        dv[:, :, block.keys] = gemm(p.to(precision.matrix).mT, d_output, vector)
        dk[:, :, block.keys] = scale * gemm(ds.mT, q_BGND, vector)
        dq += gemm(ds, block.k_BGnD, vector) + inv * r_BGN1 * mean_BG1D
    dtype = q_BHSD.dtype
    return AttentionGradients(unfold_heads(dq, heads).to(dtype), dk.to(dtype), dv.to(dtype))


def _real_keys(k_BGTD, v_BGTE, mask: AttentionMask):
    """Padding filled with zeros: it is part of the means, and inf x 0 would be NaN."""
    if not mask.has_unused_keys:
        return k_BGTD, v_BGTE
    used_BT = mask.used_keys_BT(k_BGTD.device)
    return zero_unused(k_BGTD, used_BT), zero_unused(v_BGTE, used_BT)


def _blocks(q_BGND, k_BGTD, mask: AttentionMask, scale, beta, precision, block_size):
    """Yield each block with its shifted keys and scores.

    The mean of a row is over all its keys, masked or not, because the shift was. Blocks that no
    query attends are left out.
    """
    repeats = q_BGND.shape[2] // mask.num_queries
    allowed_B1NT = mask.allowed_BHST(q_BGND.device).repeat(1, 1, repeats, 1)
    for start in range(0, k_BGTD.shape[2], block_size):
        keys = slice(start, min(start + block_size, k_BGTD.shape[2]))
        if not allowed_B1NT[..., keys].any():
            continue
        size = keys.stop - start
        matrix = shifting_matrix(size, beta, scale, precision.matrix).to(k_BGTD.device)
        k_BGnD = gemm(matrix, k_BGTD[:, :, keys].to(precision.matrix), precision.matrix)
        score = gemm(q_BGND, k_BGnD.mT, precision.score).to(precision.vector)
        mean = score.mean(-1, dtype=precision.vector)
        yield _Block(keys, k_BGnD, score, mean, allowed_B1NT[..., keys])
