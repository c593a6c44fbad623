# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Describes how a run's ranks hold a model: each tensor of its checkpoint is cut into boxes."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch

from megatron_asynchzp.errors import ConfigurationError


class Address(NamedTuple):
    """Where each holder of a box has its elements, which lie one after another."""

    chunk: int  # index of the model chunk
    unit: int  # of its unit
    param: int  # of the unit's parameter
    start: int  # first element of the parameter


class HeldBox(NamedTuple):
    """A box of a tensor of the checkpoint, in which layers and experts are stacked."""

    key: str  # of the tensor
    size: tuple[int, ...]  # of the tensor
    offset: tuple[int, ...]  # of the box, in each dim of the tensor
    shape: tuple[int, ...]  # of the box
    dtype: torch.dtype
    holders: tuple[int, ...]  # global ranks of the sharding group, in its order
    address: Address
    copy: tuple[int, ...]  # (0, 0): of tied or duplicated tensors the copy that a checkpoint holds

    @property
    def numel(self) -> int:
        return prod(self.shape)


def distinct_boxes(described: Iterable[HeldBox]) -> dict[str, list[HeldBox]]:
    """Return each box once, by key, out of those that all ranks described.

    Raises:
        ConfigurationError: The boxes of a tensor do not make up the whole of it.
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
                f"{key}: the ranks hold {held} of its {wanted} elements, and only whole models can "
                "be streamed"
            )
    return by_key
