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
    """Where a box lies on each of its holders: which chunk, which unit of it, which parameter of
    that, and the first element. Its elements lie one after another."""

    chunk: int
    unit: int
    param: int
    start: int


class HeldRun(NamedTuple):
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


def distinct_runs(described: Iterable[HeldRun]) -> dict[str, list[HeldRun]]:
    """Each box once, of the copy that a checkpoint holds, by key.

    described: of all ranks. Raises ConfigurationError where the boxes of a tensor are not the
    whole of it.
    """
    boxes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], HeldRun] = {}
    for run in described:
        box = run.key, run.offset, run.shape
        if box not in boxes or run.copy < boxes[box].copy:
            boxes[box] = run
    by_key: dict[str, list[HeldRun]] = {}
    for run in boxes.values():
        by_key.setdefault(run.key, []).append(run)
    for key, runs in by_key.items():
        sizes = sorted({run.size for run in runs})
        if len(sizes) > 1:
            raise ConfigurationError(f"{key}: the ranks describe it with sizes {sizes}")
        held, wanted = sum(run.numel for run in runs), prod(sizes[0])
        if held != wanted:
            raise ConfigurationError(
                f"{key}: the ranks hold {held} of its {wanted} elements; a model of which a part "
                "is elsewhere cannot be streamed"
            )
    return by_key
