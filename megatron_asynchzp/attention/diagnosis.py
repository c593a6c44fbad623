# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a layer's queries and keys: whether fp16 holds their scores, and dQ's error by bias."""

from dataclasses import dataclass
from math import sqrt

import torch

from megatron_asynchzp.attention.call import fold_heads
from megatron_asynchzp.attention.key_shift import SnapRule, shift_keys

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HeadDiagnosis:
    """A key head and the query heads that share it. *_shifted: the same of k minus its shift."""

    layer: int | str
    head: int
    sequence_bias: float  # size of the mean key / spread of the keys around it, both over channels
    # mean cosine between the queries and the mean key; 1 in phase, -1 the opposite
    resonance: float
    largest_score: float  # largest |q k| over all queries and keys
    largest_scaled: float  # largest |q k| / sqrt(d)
    overflows: bool  # fp16 cannot hold q k
    # factor of the bias on the rounding error of dQ in a standard flash attention, which multiplies
    # rounded dS by k instead of k - mean
    amplification: float
    sequence_bias_shifted: float
    largest_score_shifted: float
    overflows_shifted: bool
    amplification_shifted: float

    @property
    def needs_pasa(self) -> bool:
        """Whether q k overflows, or dQ has at least twice the error of centred keys."""
        return self.overflows or not self.amplification < 2  # NaN is no small error


def diagnose(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, layer: int | str = 0
) -> list[HeadDiagnosis]:
    """Return an entry per key head. Scores are computed for all pairs, masked or not.

    Shifted figures are those of mode delegate, one shift per head on the grid of k's dtype.
    """
    q, k = fold_heads(q_BHSD, k_BGTD.shape[1]).float(), k_BGTD.float()
    shifted = shift_keys(k_BGTD, rule=SnapRule.RATIO).keys_BGTD.float()
    scale = 1 / sqrt(k.shape[-1])
    heads = []
    for head in range(k.shape[1]):
        before = _scores(q[:, head], k[:, head])
        after = _scores(q[:, head], shifted[:, head])
        heads.append(
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
    return heads


def _scores(q_BND: torch.Tensor, k_BTD: torch.Tensor, rows: int = 1024) -> float:
    parts = [(part @ k_BTD.mT).abs().max() for part in q_BND.split(rows, 1)]
    return torch.stack(parts).max().item()


def _bias(k_BTD: torch.Tensor) -> float:
    mean_B1D = k_BTD.mean(1, keepdim=True)
    spread = (k_BTD - mean_B1D).square().mean().sqrt()
    return (mean_B1D.square().mean().sqrt() / spread.clamp(min=1e-30)).item()


def _amplification(k_BTD: torch.Tensor) -> float:
    """Return |k| / |k - mean|, the ratio of dQ's errors if errors of dS are independent."""
    return sqrt(1 + _bias(k_BTD) ** 2)


def _resonance(q_BND: torch.Tensor, k_BTD: torch.Tensor) -> float:
    mean_B1D = k_BTD.mean(1, keepdim=True).expand_as(q_BND)
    return torch.cosine_similarity(q_BND, mean_B1D, dim=-1).mean().item()
