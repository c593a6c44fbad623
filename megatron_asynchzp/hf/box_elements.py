# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what travels of a box of a tensor: all elements, or those that changed; and the tensor that
boxes make up.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.hf.held_boxes import HeldBox

_INDEX = torch.int32
ALL = -1
"""In place of a count: all elements of a box, whose indices are not sent."""


class BoxElements(NamedTuple):
    """Elements of one box.

    values: 1-D.
    indices: of them in the box, 1-D int32, ascending; None where `values` has all.
    """

    values: Tensor
    indices: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, changed: Tensor | None) -> "BoxElements":
        """Take what changed, or all where that is shorter. values: all; changed: bool; both 1-D."""
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
    ) -> "BoxElements":
        """Memory for the elements of a box of `numel` elements whose `count` is this."""
        if count == ALL:
            return cls(torch.empty(numel, dtype=dtype, device=device))
        values = torch.empty(count, dtype=dtype, device=device)
        return cls(values, torch.empty(count, dtype=_INDEX, device=device))

    @property
    def count(self) -> int:
        """Number of elements, for whoever receives them."""
        return ALL if self.indices is None else self.values.numel()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that have to be sent."""
        for tensor in self:
            if tensor is not None and tensor.numel():
                yield tensor


type Elements = dict[HeldBox, BoxElements]


def join(
    elements: Elements, boxes: Sequence[HeldBox], stacked: int, size: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """The tensor of `size` that `boxes` make up, and which of its elements came: bool,
    None for all; the others are 0. Takes them out of `elements`.

    stacked: leading dimensions of the boxes that this tensor is one element of.
    """
    has_all = all(elements[box].indices is None for box in boxes)
    if has_all and len(boxes) == 1:
        return elements.pop(boxes[0]).values.view(size), None
    first = elements[boxes[0]].values
    whole = first.new_zeros(size)
    came = None if has_all else torch.zeros(size, dtype=torch.bool, device=first.device)
    for box in boxes:
        values, indices = elements.pop(box)
        extents = zip(box.offset[stacked:], box.shape[stacked:], strict=True)
        part = tuple(slice(start, start + length) for start, length in extents)
        shape = box.shape[stacked:]
        if indices is None:
            whole[part] = values.view(shape)
            if came is not None:
                came[part] = True
            continue
        assert came is not None
        places = indices.long()
        whole[part] = values.new_zeros(box.numel).index_put_((places,), values).view(shape)
        flags = torch.zeros(box.numel, dtype=torch.bool, device=values.device)
        came[part] = flags.index_fill_(0, places, True).view(shape)
    return whole, came
