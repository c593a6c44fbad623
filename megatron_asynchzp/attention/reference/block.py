# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The reference of block mode, with the arithmetic of the fused kernels.

Keys are shifted block by block, statistics are fp32, and all scores have one fixed frame.

    S_ij   = scale q_i k'_j + psi_iJ      k'_j = k_j - c_J,  psi_iJ = scale q_i (c_J - c_r)
           = scale q_i k_j - scale q_i c_r: true scores but for one constant per query
"""

from typing import NamedTuple

import torch

from megatron_asynchzp.attention.call import (
    AttentionGradients,
    AttentionOutput,
    fold_heads,
    unfold_heads,
)
from megatron_asynchzp.attention.key_shift import BLOCK_SIZE, ShiftedKeys, zero_unused
from megatron_asynchzp.attention.mask import AttentionMask


class BlockForward(NamedTuple):
    """The result, and the LSE in the shifted frame, which backward needs."""

    result: AttentionOutput
    shifted_lse_BHS: torch.Tensor


class _Block(NamedTuple):
    """A block of keys as a query sees it; N = R S rows, n keys."""

    keys: slice
    k_BGnD: torch.Tensor
    v_BGnE: torch.Tensor
    score_BGNn: torch.Tensor
    allowed_B1Nn: torch.Tensor


def block_forward(
    q_BHSD: torch.Tensor,
    shifted: ShiftedKeys,
    v_BGTE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> BlockForward:
    """Attend to shifted keys (see shift_keys), with the true LSE.

    Operands of products have the dtype of q, all else is in fp32 (fp64 for fp64).
    """
    heads, vector = q_BHSD.shape[1], _wide(q_BHSD.dtype)
    q_BGND = fold_heads(q_BHSD, v_BGTE.shape[1])
    maximum = q_BGND.new_full(q_BGND.shape[:-1], -torch.inf, dtype=vector)
    total = torch.zeros_like(maximum)
    output = q_BGND.new_zeros(*q_BGND.shape[:-1], v_BGTE.shape[-1], dtype=vector)
    for block in _blocks(q_BGND, shifted, v_BGTE, mask, scale):
        score = block.score_BGNn.masked_fill(~block.allowed_B1Nn, -torch.inf)
        new_maximum = torch.maximum(maximum, score.amax(-1))
        finite = new_maximum.masked_fill(new_maximum.isneginf(), 0)  # nothing attended so far
        p = (score - finite[..., None]).exp()
        keep = (maximum - finite).exp()
        total = total * keep + p.sum(-1)
        pv = gemm(p.to(q_BHSD.dtype), block.v_BGnE, vector)
        output = output * keep[..., None] + pv
        maximum = new_maximum
    is_empty = total == 0
    output_BGNE = output / total.masked_fill(is_empty, 1)[..., None]
    lse_BGN = maximum + total.log()  # -inf where nothing was attended
    frame_BGN = scale * gemm(q_BGND.to(vector), shifted.frame_BG1D.mT.to(vector), vector)
    true_lse_BGN = lse_BGN + frame_BGN[..., 0]
    return BlockForward(
        AttentionOutput(
            unfold_heads(output_BGNE, heads).to(q_BHSD.dtype), unfold_heads(true_lse_BGN, heads)
        ),
        unfold_heads(lse_BGN, heads),
    )


def block_backward(
    d_output_BHSE: torch.Tensor,
    q_BHSD: torch.Tensor,
    shifted: ShiftedKeys,
    v_BGTE: torch.Tensor,
    output_BHSE: torch.Tensor,
    shifted_lse_BHS: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> AttentionGradients:
    """Compute the gradients of q, k and v for block_forward.

        P  = exp(S - L)      D = rowsum(dO o O)      dS = P o (dO V^T - D)
        dV = P^T dO          dK = scale dS^T Q
        dQ = scale sum_J [ dS_J K'_J + r_J (c_J - mean(K)) ],   r_J = rowsum of the rounded dS_J

    In exact arithmetic the r_J of a query sum to zero, but each by itself does not: without the
    r term, dQ loses the differences between the blocks' shifts. As they sum to zero, any constant
    may be subtracted from c_J. With the mean of the keys, dQ is the sum of dS (k - mean(K)), to
    which the rounding of dS contributes no multiple of the keys' bias, shifted or not.
    """
    groups, heads, dtype = v_BGTE.shape[1], q_BHSD.shape[1], q_BHSD.dtype
    q_BGND, vector = fold_heads(q_BHSD, groups), _wide(dtype)
    d_output = fold_heads(d_output_BHSE, groups).to(dtype)
    delta_BGN = (d_output.to(vector) * fold_heads(output_BHSE, groups).to(vector)).sum(-1)
    lse = fold_heads(shifted_lse_BHS, groups)
    lse = lse.masked_fill(lse.isneginf(), 0)[..., None]
    dq = torch.zeros_like(q_BGND, dtype=vector)
    dk = torch.zeros_like(shifted.keys_BGTD, dtype=vector)
    dv = torch.zeros_like(v_BGTE, dtype=vector)
    gradient_shift_BGJD = shifted.gradient_shift_BGJD().to(vector)
    for block in _blocks(q_BGND, shifted, v_BGTE, mask, scale):
        score = block.score_BGNn.masked_fill(~block.allowed_B1Nn, -torch.inf)
        p = (score - lse).exp()
        dp = gemm(d_output, block.v_BGnE.mT, vector)
        ds = (p * (dp - delta_BGN[..., None])).to(dtype)
        dv[:, :, block.keys] = gemm(p.to(dtype).mT, d_output, vector)
        dk[:, :, block.keys] = scale * gemm(ds.mT, q_BGND, vector)
        c_BG1D = gradient_shift_BGJD[:, :, block.keys.start // shifted.block_size, None]
        # r_J (c_J - mean(K)): the part of dS_J K_J that K'_J no longer holds.
        r_term = ds.to(vector).sum(-1, keepdim=True) * c_BG1D
        dq += scale * (gemm(ds, block.k_BGnD, vector) + r_term)
    return AttentionGradients(unfold_heads(dq, heads).to(dtype), dk.to(dtype), dv.to(dtype))


def _blocks(q_BGND, shifted: ShiftedKeys, v_BGTE, mask: AttentionMask, scale: float):
    """Yield each block of keys that some query attends, with its scores, unmasked."""
    matrix, vector = q_BGND.dtype, _wide(q_BGND.dtype)
    num_keys, repeats = v_BGTE.shape[2], q_BGND.shape[2] // mask.num_queries
    score_shift_BGJD = shifted.score_shift_BGJD().to(vector)
    allowed_B1NT = mask.allowed_BHST(q_BGND.device).repeat(1, 1, repeats, 1)
    if mask.has_unused_keys:  # what a padded slot holds must not meet P = 0
        v_BGTE = zero_unused(v_BGTE, mask.used_keys_BT(q_BGND.device))
    step = BLOCK_SIZE if shifted.is_global else shifted.block_size
    for start in range(0, num_keys, step):
        keys = slice(start, min(start + step, num_keys))
        allowed = allowed_B1NT[..., keys]
        if not allowed.any():
            continue
        k_BGnD = shifted.keys_BGTD[:, :, keys].to(matrix)
        score = scale * gemm(q_BGND, k_BGnD.mT, vector)
        if not shifted.is_global:
            c_BGD1 = score_shift_BGJD[:, :, start // shifted.block_size, :, None]
            score = score + scale * gemm(q_BGND.to(vector), c_BGD1, vector)
        yield _Block(keys, k_BGnD, v_BGTE[:, :, keys].to(matrix), score, allowed)


def gemm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b as a matrix unit rounds it, the same on every device.

    It is summed in fp32 (fp64 for fp64 operands), and rounded once to `out_dtype`.
    """
    wide = _wide(torch.promote_types(a.dtype, b.dtype))
    return (a.to(wide) @ b.to(wide)).to(out_dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
