# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the shift of the keys: a vector per block or sequence, on the grid of the keys' dtype.

Softmax does not see it: q (k - c) differs from q k by one number per query as long as c is the
same for all keys, and where c differs between blocks the difference is added to the scores.
"""

from enum import Enum
from math import log2
from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK_SIZE = 128  # keys per block (s2 in the paper)
# Part of a channel's largest key below which its mean is left alone (SnapRule.RATIO).
SNAP_RATIO = 0.25


class SnapRule(Enum):
    """Which channels of a block are shifted, by their mean on the grid of the block's largest key.

    k - c is rounded to the dtype of k: on that grid it is exact for keys near c, and keys near zero
    may need more bits than the dtype has.
    """

    RATIO = "ratio"  # channels whose mean is at least SNAP_RATIO of the largest key
    LOSSLESS = "lossless"  # channels in which k - c is exact for every key of the block


class ShiftedKeys(NamedTuple):
    """Keys minus the shift c of their block."""

    keys_BGTD: torch.Tensor  # k - c, in the dtype of k
    shift_BGJD: torch.Tensor  # c of each block, fp32 (fp64 for fp64); J = 1 for a global shift
    mean_BG1D: torch.Tensor  # of all keys, not rounded to any grid
    block_size: int  # keys that share a shift

    @property
    def is_global(self) -> bool:
        return self.shift_BGJD.shape[2] == 1

    @property
    def frame_BG1D(self) -> torch.Tensor:
        """c_r of the scores, the mean of the shifts.

        Any constant is exact; rounding errors grow with the distance of c_J from it.
        """
        return self.shift_BGJD.mean(2, keepdim=True)

    def score_shift_BGJD(self) -> torch.Tensor:
        """Return c_J - c_r: its product with a query undoes the shifts of the blocks."""
        return self.shift_BGJD - self.frame_BG1D

    def gradient_shift_BGJD(self) -> torch.Tensor:
        """Return c_J - mean, the factor of dS's row sums in dQ.

        With the mean of all keys instead of c_r, dQ is that of centred keys also in channels that
        were not shifted.
        """
        return self.shift_BGJD - self.mean_BG1D


def shift_keys(
    k_BGTD: torch.Tensor,
    block_size: int | None = None,
    *,
    rule: SnapRule = SnapRule.LOSSLESS,
    used_BT: torch.Tensor | None = None,
) -> ShiftedKeys:
    """Subtract its mean from every block of `block_size` keys (None: from all keys at once).

    Means are taken in fp32, or fp64 for fp64 keys. The shift is a constant to autograd:
    d output / d shift is zero. Keys that are not used ([B or 1, T] bool) become zeros and do not
    count, so that a padded slot, inf included, affects no output.
    """
    num_keys = k_BGTD.shape[2]
    block_size = min(block_size or num_keys, num_keys)
    wide = torch.float64 if k_BGTD.dtype == torch.float64 else torch.float32
    if used_BT is not None:
        k_BGTD = zero_unused(k_BGTD, used_BT)
    with torch.no_grad():
        shift_BGJD, mean_BG1D = _means(k_BGTD, used_BT, block_size, wide)
        shift_BGJD = _snap(shift_BGJD, _blocks(k_BGTD.detach(), block_size), rule)
        # On the grid of k the shift is a number of k's dtype: nothing is widened.
        per_key_BGTD = shift_BGJD.to(k_BGTD.dtype)
        if shift_BGJD.shape[2] > 1:
            per_key_BGTD = per_key_BGTD.repeat_interleave(block_size, 2)[:, :, :num_keys]
    keys_BGTD = (k_BGTD - per_key_BGTD).to(k_BGTD.dtype)
    return ShiftedKeys(keys_BGTD, shift_BGJD, mean_BG1D, block_size)


class ShiftedValues(NamedTuple):
    """Values minus their mean, which is added to the output again (not with dropout).

    That is exact because the weights of a query sum to one.
    """

    values_BGTE: torch.Tensor  # v - c
    shift_BG1E: torch.Tensor  # c, in the dtype of v

    def restore(self, output_BHSE: torch.Tensor, served_BS: torch.Tensor | None) -> torch.Tensor:
        """Return the output for v itself. served_BS: queries that attend any key (None: all)."""
        repeats = output_BHSE.shape[1] // self.shift_BG1E.shape[1]
        shift_BHSE = self.shift_BG1E.repeat_interleave(repeats, 1)
        if served_BS is None:
            return output_BHSE + shift_BHSE
        served = served_BS[:, None, :, None].to(output_BHSE.dtype)
        return torch.addcmul(output_BHSE, shift_BHSE, served)


def shift_values(v_BGTE: torch.Tensor, used_BT: torch.Tensor | None = None) -> ShiftedValues:
    """Subtract a mean per head from all values.

    The output that backward multiplies with dO then has the size, and the rounding, of v's spread
    instead of its bias.
    """
    values, shift_BG1E, _, _ = shift_keys(v_BGTE, rule=SnapRule.RATIO, used_BT=used_BT)
    return ShiftedValues(values, shift_BG1E.to(v_BGTE.dtype))


def zero_unused(x_BGTD: torch.Tensor, used_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(used_BT[:, None, :, None], x_BGTD, torch.zeros_like(x_BGTD[:1, :1, :1, :1]))


def _blocks(x_BGTD: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return [B, G, J, n, D]; copies of the last key fill the last block."""
    missing = -x_BGTD.shape[2] % block_size
    if not missing:
        return x_BGTD.unflatten(2, (-1, block_size))
    last = x_BGTD[:, :, -1:].expand(-1, -1, missing, -1)
    return torch.cat((x_BGTD, last), 2).unflatten(2, (-1, block_size))


def _means(k_BGTD, used_BT, block_size: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of each block of keys and of all keys together, summed in `dtype`."""
    num_keys = k_BGTD.shape[2]
    missing = -num_keys % block_size
    padded = F.pad(k_BGTD, (0, 0, 0, missing)) if missing else k_BGTD
    sum_BGJD = padded.unflatten(2, (-1, block_size)).sum(3, dtype=dtype)
    if used_BT is None:
        used_BT = torch.ones(1, num_keys, dtype=torch.bool, device=k_BGTD.device)
    count_BJ = F.pad(used_BT, (0, missing)).unflatten(1, (-1, block_size)).sum(2)
    mean_BGJD = sum_BGJD / count_BJ.clamp(min=1)[:, None, :, None]
    total_B = count_BJ.sum(1).clamp(min=1)
    return mean_BGJD, sum_BGJD.sum(2, keepdim=True) / total_B[:, None, None, None]


def _snap(shift_BGJD: torch.Tensor, k_BGJnD: torch.Tensor, rule: SnapRule) -> torch.Tensor:
    largest = k_BGJnD.abs().amax(3).to(shift_BGJD.dtype)
    bits = -round(log2(torch.finfo(k_BGJnD.dtype).eps))  # of the mantissa
    spacing = torch.ldexp(torch.ones_like(largest), largest.frexp()[1] - 1 - bits)
    snapped = (shift_BGJD / spacing).round() * spacing
    if rule is SnapRule.RATIO:
        is_shifted = shift_BGJD.abs() >= SNAP_RATIO * largest
    else:
        exact = k_BGJnD - snapped[:, :, :, None]  # in fp32: of 16-bit numbers nothing is lost
        is_shifted = (exact.to(k_BGJnD.dtype) == exact).all(3)
    # A block that holds an inf or NaN has no grid; it is left as it is.
    return torch.where(is_shifted & largest.isfinite(), snapped, torch.zeros_like(shift_BGJD))
