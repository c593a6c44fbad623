# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what travels of a box of a tensor: all elements, or those that changed; and the tensor that
boxes make up.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.hf.held_runs import HeldRun

_INDEX = torch.int32
ALL = -1
"""In place of a count: all elements of a box, whose indices are not sent."""


class Piece(NamedTuple):
    """Elements of one box.

    values: 1-D.
    indices: of them in the box, 1-D int32, ascending; None where `values` has all.
    """

    values: Tensor
    indices: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, changed: Tensor | None) -> "Piece":
        """What changed, or all where that is shorter. values: all; changed: bool; both 1-D."""
        if changed is None or values.numel() >= torch.iinfo(_INDEX).max:
            return cls(values)
        count = int(changed.count_nonzero())
        if count * (values.itemsize + _INDEX.itemsize) >= values.nbytes:
            return cls(values)
        indices = changed.nonzero().view(-1)
        return cls(values[indices], indices.to(_INDEX))

    @classmethod
    def to_receive(
        cls, numel: int, dtype: torch.dtype, device: torch.device, count: int
    ) -> "Piece":
        """Memory for a piece of a box of `numel` elements whose `count` is this."""
        if count == ALL:
            return cls(torch.empty(numel, dtype=dtype, device=device))
        values = torch.empty(count, dtype=dtype, device=device)
        return cls(values, torch.empty(count, dtype=_INDEX, device=device))

    @property
    def count(self) -> int:
        """How many elements, for whoever receives them."""
        return ALL if self.indices is None else self.values.numel()

    def tensors(self) -> Iterator[Tensor]:
        """What has to be sent of it."""
        for tensor in self:
            if tensor is not None and tensor.numel():
                yield tensor


def join(
    runs: Sequence[HeldRun], num_stacked: int, size: torch.Size, pieces: dict[HeldRun, Piece]
) -> tuple[Tensor, Tensor | None]:
    """The tensor of `size` that the boxes `runs` make up, and which of its elements came: bool,
    None for all; the others are 0. Takes the pieces out of `pieces`.

    num_stacked: leading dimensions of the boxes that this tensor is one element of.
    """
    has_all = all(pieces[run].indices is None for run in runs)
    if has_all and len(runs) == 1:
        return pieces.pop(runs[0]).values.view(size), None
    first = pieces[runs[0]].values
    whole = first.new_zeros(size)
    came = None if has_all else torch.zeros(size, dtype=torch.bool, device=first.device)
    for run in runs:
        values, indices = pieces.pop(run)
        extents = zip(run.offset[num_stacked:], run.shape[num_stacked:], strict=True)
        box = tuple(slice(start, start + length) for start, length in extents)
        shape = run.shape[num_stacked:]
        if indices is None:
            whole[box] = values.view(shape)
            if came is not None:
                came[box] = True
            continue
        assert came is not None
        places = indices.long()
        whole[box] = values.new_zeros(run.numel).index_put_((places,), values).view(shape)
        flags = torch.zeros(run.numel, dtype=torch.bool, device=values.device)
        came[box] = flags.index_fill_(0, places, True).view(shape)
    return whole, came
