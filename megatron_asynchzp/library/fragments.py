# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of each parameter, and what of it its optimizer trains."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_asynchzp.library.state import ShardedState
from megatron_asynchzp.sharding.topology import Range
from megatron_asynchzp.zero.guard import SHARDED_AS
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass(frozen=True, eq=False)
class HeldFragment:
    """The part of one parameter that this rank holds.

    held: its elements, of the row-major parameter; values: 1-D, these elements of the fp32 main
    parameter where it is trained, else of the model's.
    """

    name: str
    shape: tuple[int, ...]
    held: Range
    values: torch.Tensor

    def state_of(self, values: torch.Tensor) -> ShardedState:
        """`values` (1-D, of the same elements) for a checkpoint."""
        return ShardedState(self.shape, self.held, values)


@dataclass(frozen=True, eq=False)
class TrainedFragment(HeldFragment):
    """param: `values` for the optimizer; grad: its gradient, 1-D fp32; is_counted: whether sums
    over the ranks take this part from this rank, not from a replica of it."""

    unit: HZPUnit
    param: nn.Parameter
    grad: torch.Tensor
    is_counted: bool


def fragments_of(unit: HZPUnit) -> Iterator[HeldFragment]:
    slices = unit.layout.slices
    if not unit.is_trained:
        for index, piece in enumerate(slices):
            yield HeldFragment(piece.name, piece.shape, *unit.model_param.elements_of(index))
        return
    for piece, own in zip(slices, unit.new_fragments(), strict=True):
        named = piece.name, piece.shape, own.held, own.values
        given = vars(unit.params[own.index]).items()  # by which people build groups
        vars(own.param).update(one for one in given if one[0] != SHARDED_AS)
        yield TrainedFragment(*named, unit, own.param, own.grad, unit.is_counted)
