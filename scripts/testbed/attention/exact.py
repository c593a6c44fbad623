# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the oracle: softmax attention and its gradients in fp64, with the whole score matrix."""

import torch

from megatron_asynchzp.attention.call import (
    AttentionGradients,
    AttentionOutput,
    fold_heads,
    unfold_heads,
)
from megatron_asynchzp.attention.mask import AttentionMask


def exact_forward(
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> AttentionOutput:
    """softmax(scale q k^T) v, all in fp64 whatever the dtype of the inputs; nothing is shifted."""
    score_BGNT, v = _scores(q_BHSD, k_BGTD, mask, scale), v_BGTE.double()
    lse_BGN = score_BGNT.logsumexp(-1)
    output_BGNE = _probabilities(score_BGNT, lse_BGN) @ v
    heads = q_BHSD.shape[1]
    return AttentionOutput(unfold_heads(output_BGNE, heads), unfold_heads(lse_BGN, heads))


def exact_backward(
    d_output_BHSE: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> AttentionGradients:
    """Gradients in fp64, by the formula of softmax: dS = P o (dP - rowsum(dP o P))."""
    groups, heads = k_BGTD.shape[1], q_BHSD.shape[1]
    score_BGNT = _scores(q_BHSD, k_BGTD, mask, scale)
    p_BGNT = _probabilities(score_BGNT, score_BGNT.logsumexp(-1))
    d_output_BGNE = fold_heads(d_output_BHSE, groups).double()
    dp_BGNT = d_output_BGNE @ v_BGTE.double().mT
    ds_BGNT = p_BGNT * (dp_BGNT - (dp_BGNT * p_BGNT).sum(-1, keepdim=True))
    return AttentionGradients(
        unfold_heads(scale * ds_BGNT @ k_BGTD.double(), heads),
        scale * ds_BGNT.mT @ fold_heads(q_BHSD, groups).double(),
        p_BGNT.mT @ d_output_BGNE,
    )


def _scores(q_BHSD, k_BGTD, mask: AttentionMask, scale: float) -> torch.Tensor:
    groups = k_BGTD.shape[1]
    score_BGNT = scale * fold_heads(q_BHSD, groups).double() @ k_BGTD.double().mT
    allowed_B1NT = mask.allowed_BHST(q_BHSD.device).repeat(1, 1, q_BHSD.shape[1] // groups, 1)
    return score_BGNT.masked_fill(~allowed_B1NT, -torch.inf)


def _probabilities(score_BGNT: torch.Tensor, lse_BGN: torch.Tensor) -> torch.Tensor:
    is_empty = lse_BGN.isneginf()[..., None]
    return (score_BGNT - lse_BGN[..., None].masked_fill(is_empty, 0)).exp()
