# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the model of the schedule benchmarks."""

from dataclasses import dataclass

import torch
from torch import nn

from scripts.testbed.contenders.layer_delay import Delay


@dataclass(frozen=True)
class ModelSize:
    """The size of the model.

    `hidden`, `blocks`: 12 hidden^2 parameters a block; `rows`: of a micro-batch of one rank;
    `block_ms`: emulated forward time of a block, its backward takes twice that; `micro_batches`: of
    a step.
    """

    hidden: int = 512
    blocks: int = 6
    rows: int = 16
    block_ms: float = 20.0
    micro_batches: int = 1

    @property
    def block_nbytes(self) -> int:
        """Of a block's parameters."""
        return 4 * (12 * self.hidden**2 + 9 * self.hidden)


class Block(nn.Module):
    """Norm, two linears with a GELU between them, residual. Each linear takes half of the time."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.up = nn.Linear(size.hidden, 6 * size.hidden)
        self.down = nn.Linear(6 * size.hidden, size.hidden)
        self._half_s = 0.5e-3 * size.block_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self._taking_time(self.up(self.norm(x))))
        return x + self._taking_time(self.down(inner))

    def _taking_time(self, x: torch.Tensor) -> torch.Tensor:
        return Delay.apply(x, self._half_s) if self._half_s else x


class DelayedModel(nn.Module):
    """A stack of blocks, the same on every rank."""

    def __init__(self, size: ModelSize):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch_of(size: ModelSize, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target, different for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size.rows, size.hidden, generator=generator)
    return x.requires_grad_(), x.detach().roll(1, -1)
