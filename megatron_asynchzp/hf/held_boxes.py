# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a model is cut over all ranks of a run: every tensor, in the names of a checkpoint, into
boxes, each with the ranks that hold it.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch

from megatron_asynchzp.errors import ConfigurationError


class Address(NamedTuple):
    """Address of a box on each of its holders: which chunk, which unit of it, which parameter of
    that, and the first element. Its elements lie one after another."""

    chunk: int
    unit: int
    param: int
    start: int


class HeldBox(NamedTuple):
    """One box of a tensor of the checkpoint.

    key, size: of the tensor, in which layers and experts are stacked.
    offset, shape: of the box, with an entry for each dim of the tensor.
    holders: global ranks of the sharding group, in its order.
    copy: (0, 0) for the one copy of tied or duplicated tensors that a checkpoint holds.
    """

    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[int, ...]
    address: Address
    copy: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def distinct_boxes(described: Iterable[HeldBox]) -> dict[str, list[HeldBox]]:
    """Each box once, of the copy that a checkpoint holds, by key.

    described: of all ranks. Raises ConfigurationError where the boxes of a tensor are not the
    whole of it.
    """
    chosen: dict[tuple[str, tuple[int, ...], tuple[int, ...]], HeldBox] = {}
    for box in described:
        place = box.key, box.offset, box.shape
        if place not in chosen or box.copy < chosen[place].copy:
            chosen[place] = box
    by_key: dict[str, list[HeldBox]] = {}
    for box in chosen.values():
        by_key.setdefault(box.key, []).append(box)
    for key, boxes in by_key.items():
        sizes = sorted({box.size for box in boxes})
        if len(sizes) > 1:
            raise ConfigurationError(f"{key}: the ranks describe it with sizes {sizes}")
        held, wanted = sum(box.numel for box in boxes), prod(sizes[0])
        if held != wanted:
            raise ConfigurationError(
                f"{key}: the ranks hold {held} of its {wanted} elements; a model of which a part "
                "is elsewhere cannot be streamed"
            )
    return by_key
