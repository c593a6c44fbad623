# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes inputs on which the error of an attention is measured, and measures it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_asynchzp.attention.mask import AttentionMask


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
        q, k, v = (self._sample(shape, generator) for shape in shapes)
        grad = torch.randn(1, heads, length, dim, generator=generator).double()
        return Inputs(q, k, v, grad)

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


def relative_rmse(found: torch.Tensor, true: torch.Tensor) -> float:
    """RMS of the error over the RMS of the truth."""
    return ((found.double() - true.double()).norm() / true.double().norm()).item()
