# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Packs the elements of boxes to be sent, all or only changed ones, and joins boxes to a tensor."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.hf.held_boxes import HeldBox

_INDEX = torch.int32
ALL = -1
"""Stands for a count if all elements of a box are sent, without indices."""


class BoxElements(NamedTuple):
    """All or some elements of a box."""

    values: Tensor  # 1-D
    indices: Tensor | None = None  # places in the box, 1-D int32, ascending; None: all

    @classmethod
    def of(cls, values: Tensor, changed: Tensor | None) -> "BoxElements":
        """Pack the changed elements (1-D bool) of `values` (1-D), or all if that takes less."""
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
        if count == ALL:
            return cls(torch.empty(numel, dtype=dtype, device=device))
        values = torch.empty(count, dtype=dtype, device=device)
        return cls(values, torch.empty(count, dtype=_INDEX, device=device))

    @property
    def count(self) -> int:
        return ALL if self.indices is None else self.values.numel()

    def tensors(self) -> Iterator[Tensor]:
        for tensor in self:
            if tensor is not None and tensor.numel():
                yield tensor


type Elements = dict[HeldBox, BoxElements]


def join(
    elements: Elements, boxes: Sequence[HeldBox], stacked: int, size: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """Join `boxes` to the tensor of `size`, and remove them from `elements`.

    In the first `stacked` dimensions a box has one element of a stack. Elements that were not sent
    are 0. Also return the mask (bool) of those that were, or None if all were.
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
