# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fragment of each parameter that a rank holds, and that its optimizer trains."""

from dataclasses import dataclass

import torch
from torch import nn

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.library.state import ShardedState


@dataclass(frozen=True, eq=False)
class HeldFragment:
    """The part of one parameter that this rank has."""

    name: str
    shape: tuple[int, ...]
    held: Range  # elements of the row-major parameter
    values: torch.Tensor  # 1-D, of the fp32 main parameter if trained, else of the model's

    def state_of(self, values: torch.Tensor) -> ShardedState:
        """Wrap `values` (1-D, of the same elements) for a checkpoint."""
        return ShardedState(self.shape, self.held, values)


@dataclass(frozen=True, eq=False)
class TrainedFragment(HeldFragment):
    """The part of a trained parameter, for the optimizer."""

    unit: HZPUnit
    param: nn.Parameter  # `values` for the optimizer
    grad: torch.Tensor  # 1-D fp32
    is_first_replica: bool  # whether sums over the ranks count this part, not a replica's
