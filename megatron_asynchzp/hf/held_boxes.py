# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Describes how ranks hold a model: each tensor of its checkpoint is cut into boxes."""

import sys
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.marks import unpacked
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel


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
    """Return each box once, by key; raise ConfigurationError for a tensor that is not whole."""
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


def described_boxes(model: Sequence[AsyncHZPDataParallel]) -> list[HeldBox]:
    """Return the boxes of each sharding group in which this rank is the first, between two steps.

    Raises ConfigurationError for a parameter that a checkpoint cannot hold.
    """
    boxes: list[HeldBox] = []
    shared: dict[object, object] = {}  # equal tuples once: the boxes are pickled

    def once[T](value: T) -> T:
        return shared.setdefault(value, value)  # pyright: ignore[reportReturnType]

    for chunk_index, chunk in enumerate(model):
        stored = chunk.checkpoint.stored_runs()
        for unit_index, unit in enumerate(chunk.units):
            if unit.groups.topology.rank:
                continue
            for index, param in enumerate(unit.params):
                for run in (run for copy in stored[param] for run in copy):
                    entry = run.entry
                    size, offset = tuple(entry.global_shape), tuple(entry.global_offset)
                    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
                    assert len(size) == len(offset) == len(shape), entry.key
                    replica_id: tuple[int, ...] = entry.replica_id  # pyright: ignore[reportAssignmentType]
                    boxes.append(
                        HeldBox(
                            sys.intern(entry.key),
                            once(size),
                            once(offset),
                            once(shape),
                            unit.dtype,
                            once(unit.groups.ranks),
                            Address(chunk_index, unit_index, index, run.start),
                            once(tuple(replica_id[:2])),
                        )
                    )
    return boxes


def unit_at(model: Sequence[AsyncHZPDataParallel], address: Address) -> HZPUnit:
    return model[address.chunk].units[address.unit]


def elements_of(box: HeldBox, unit: HZPUnit, whole: torch.Tensor) -> torch.Tensor:
    part = _part_of(box, unit)
    return whole[part.start : part.stop]


def changed_elements_of(box: HeldBox, unit: HZPUnit, marks: torch.Tensor) -> torch.Tensor:
    """Return the marks (1-D bool) of a box out of those of the unit, which whole_marks gives."""
    part = _part_of(box, unit)
    skipped = part.start % 8
    aligned = Range(part.start - skipped, part.stop)
    return unpacked(marks, aligned, (aligned.numel,))[skipped:]


def _part_of(box: HeldBox, unit: HZPUnit) -> Range:
    start = unit.layout.slices[box.address.param].range.start + box.address.start
    return Range(start, start + box.numel)
