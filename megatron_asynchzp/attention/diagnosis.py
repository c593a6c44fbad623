# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what is measured about one layer's queries and keys: whether half precision can hold their
scores, and what their bias does to dQ.
"""

from dataclasses import dataclass
from math import sqrt

import torch

from megatron_asynchzp.attention.heads import fold_heads
from megatron_asynchzp.attention.key_shift import SnapRule, shift_keys

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HeadDiagnosis:
    """One key head and the query heads that share it.

    sequence_bias: size of the mean key over the spread of the keys around it, both over channels.
    resonance: mean cosine between the queries and the mean key; 1 in phase, -1 the opposite.
    largest_score, largest_scaled: of q k and of q k / sqrt(d), over all queries and keys.
    overflows: whether fp16 cannot hold q k.
    amplification: by how much the bias multiplies the rounding error of dQ in a standard flash
        attention, whose rounded dS is multiplied by k and not by k - mean.
    *_shifted: the same of k minus its shift.
    """

    layer: int | str
    head: int
    sequence_bias: float
    resonance: float
    largest_score: float
    largest_scaled: float
    overflows: bool
    amplification: float
    sequence_bias_shifted: float
    largest_score_shifted: float
    overflows_shifted: bool
    amplification_shifted: float

    @property
    def needs_pasa(self) -> bool:
        """Overflow, or an error of dQ that is at least twice what it could be."""
        return self.overflows or not self.amplification < 2  # NaN is no small error


def diagnose(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, layer: int | str = 0
) -> list[HeadDiagnosis]:
    """One entry per key head. Scores are taken for all pairs, whatever a mask would hide.

    Shifted figures are those of mode delegate, one shift per head on the grid of k's dtype.
    """
    q, k = fold_heads(q_BHSD, k_BGTD.shape[1]).float(), k_BGTD.float()
    shifted = shift_keys(k_BGTD, rule=SnapRule.RATIO).keys_BGTD.float()
    scale = 1 / sqrt(k.shape[-1])
    found = []
    for head in range(k.shape[1]):
        before = _scores(q[:, head], k[:, head])
        after = _scores(q[:, head], shifted[:, head])
        found.append(
            HeadDiagnosis(
                layer,
                head,
                _bias(k[:, head]),
                _resonance(q[:, head], k[:, head]),
                before,
                before * scale,
                not before <= FP16_MAX,
                _amplification(k[:, head]),
                _bias(shifted[:, head]),
                after,
                not after <= FP16_MAX,
                _amplification(shifted[:, head]),
            )
        )
    return found


def channel_means(k_BGTD: torch.Tensor) -> torch.Tensor:
    """[G, D]: what a shift takes off each channel, for a picture."""
    return k_BGTD.float().mean((0, 2))


def _scores(q_BND: torch.Tensor, k_BTD: torch.Tensor, rows: int = 1024) -> float:
    """Return the largest |q k|, a few rows at a time."""
    parts = [(part @ k_BTD.mT).abs().max() for part in q_BND.split(rows, 1)]
    return torch.stack(parts).max().item()


def _bias(k_BTD: torch.Tensor) -> float:
    mean_B1D = k_BTD.mean(1, keepdim=True)
    spread = (k_BTD - mean_B1D).square().mean().sqrt()
    return (mean_B1D.square().mean().sqrt() / spread.clamp(min=1e-30)).item()


def _amplification(k_BTD: torch.Tensor) -> float:
    """Return |k| / |k - mean|: independent errors of dS are multiplied by one or by the other."""
    return sqrt(1 + _bias(k_BTD) ** 2)


def _resonance(q_BND: torch.Tensor, k_BTD: torch.Tensor) -> float:
    mean_B1D = k_BTD.mean(1, keepdim=True).expand_as(q_BND)
    return torch.cosine_similarity(q_BND, mean_B1D, dim=-1).mean().item()
