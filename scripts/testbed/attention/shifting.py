# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the constants of the published PASA.

How much of a block's mean is taken off its keys (beta), the matrix that does it, and the factor
that undoes it.

Section and equation names follow arXiv 2503.01873.
"""

from math import sqrt

import torch

from megatron_asynchzp.attention.key_shift import BLOCK_SIZE

# 1 - 2^-4, 1 - 2^-5, 1 - 2^-6: where the paper starts its search for beta.
INITIAL_BETAS = (1 - 2**-4, 1 - 2**-5, 1 - 2**-6)

_MAX_STEPS = 100


def recovery_factor(beta: float) -> float:
    """Inv = beta / (1 - beta): the mean of the unshifted scores is (1 + Inv) x the shifted one."""
    return beta / (1 - beta)


def shifting_matrix(
    block_size: int, beta: float, scale: float = 1.0, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """M = scale (I - beta/n J), rounded to `dtype`, of shape [n, n]; K' = (K^T M)^T.

    J is all ones and n = block_size the real number of keys in the block: the last block of a
    sequence needs a matrix of its own.
    """
    matrix = torch.full((block_size, block_size), -scale * beta / block_size, dtype=torch.float64)
    matrix.diagonal().fill_(scale * (1 - beta / block_size))
    return matrix.to(dtype)


def mean_gain(
    block_size: int, beta: float, scale: float | None = None, dtype: torch.dtype = torch.float16
) -> float:
    """Return how much of a constant column the rounded M keeps, over the intended 1 - beta.

    It is the sum of a row of M over `scale`. A `scale` of None is the published form (a - b n), in
    which the diagonal 1 - beta/n is rounded by itself and multiplied by the scale later, exactly. A
    scale is folded in before rounding.
    """
    if scale is None:
        scale = 1.0
    diagonal = _rounded(scale * (1 - beta / block_size), dtype)
    other = _rounded(scale * beta / block_size, dtype)
    return (diagonal - (block_size - 1) * other) / scale


def solve_beta(
    start: float,
    block_size: int = BLOCK_SIZE,
    head_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> float:
    """The beta near `start` whose recovery factor is right for the rounded M.

    The paper solves beta/(1-beta) = b n/(a(a - b n)) + (1-a)/a with b = fl(beta/n) and
    a = fl(1 - beta/n) + b. The right side is 1/(a - b n) - 1, so the fixed point is
    beta = 1 - (a - b n): one minus the gain that M really has.

    head_dim None: the published form, which is exact where 1/sqrt(d) is a power of two. Otherwise
    the self-consistent form, in which 1/sqrt(head_dim) is part of M when it is rounded.

    Raises ValueError where start is not in (0, 1), or where rounding leaves no fixed point.
    """
    if not 0 < start < 1:
        raise ValueError(f"beta must lie between 0 and 1, not at {start}")
    scale = None if head_dim is None else 1 / sqrt(head_dim)
    beta = start
    for _ in range(_MAX_STEPS):
        solved = 1 - mean_gain(block_size, beta, scale, dtype)
        if solved == beta:
            return beta
        beta = solved
    raise ValueError(f"no fixed point near {start} for blocks of {block_size} in {dtype}")


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()
