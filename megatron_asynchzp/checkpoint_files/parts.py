# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the parts of a tensor in torch's index: do they make up the tensor, and which to read.

[Note: parts, linearly]
torch compares the parts of a tensor in pairs if they meet in its largest dimension. A rank's part
of a matrix is whole rows: in a matrix that is wider than high, all parts meet there, and torch
compares all pairs. Both questions have answers whose time is n log n in the parts:

    overlap   cut the parts apart along one dimension after another, wherever a border crosses none
              of them. A part that ends up alone overlaps nothing, and all do if the parts are runs
              of elements, or a grid, or runs within a grid. Pairs are compared among the rest.
    lookup    sort the parts by their first element. Those that meet a box begin before the box
              ends, and follow the first that ends after the box begins: two bisections.
"""

import math
import re
from array import array
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItemType

from megatron_asynchzp.engine.sharding.value_hash import value_hash
from megatron_asynchzp.errors import ConfigurationError

# Fewer candidates are compared one by one.
_MANY = 64
_STATE_OF_LAYERS = re.compile(r"optimizer\.state\..*\.layers\.(?!\d)")


def is_state_of_layers(name: str) -> bool:
    """Return whether a tensor has a row for each layer, and none for a frozen one."""
    return _STATE_OF_LAYERS.search(name) is not None


def find_fault(
    size: Sequence[int],
    parts: Sequence[ChunkStorageMetadata],
    is_all: bool = True,
    lacks_rows: bool = False,
) -> str | None:
    """Name the fault in the parts of a tensor of `size`, for the user; None if there is none.

    Each part must lie within the tensor, no two may overlap and, with `is_all`, together they must
    be the whole of it, or with `lacks_rows` of some of its rows.
    """
    if len(size) == 0 and (is_all or len(parts) > 1):
        return None if len(parts) == 1 else f"its one element is stored {len(parts)} times"
    if any(not len(part.offsets) == len(part.sizes) == len(size) for part in parts):
        return "a part has another number of dimensions"
    starts = _matrix((part.offsets for part in parts), len(size))
    shapes = _matrix((part.sizes for part in parts), len(size))
    limits = torch.tensor(list(size), dtype=torch.int64)
    is_outside = ((starts < 0) | (starts > limits) | (shapes < 0) | (shapes > limits - starts)).any(
        1
    )
    if bool(is_outside.any()):
        return f"a part is outside of it: {_name(parts[int(is_outside.nonzero()[0])])}"
    numels = shapes.prod(1)  # of parts that are within; their sum may need more than 64 bits
    held = (int((numels >> 32).sum()) << 32) + int((numels & 0xFFFFFFFF).sum())
    wanted = math.prod(size)
    if lacks_rows:
        rows = {row for p in parts for row in range(p.offsets[0], p.offsets[0] + p.sizes[0])}
        wanted = max(1, len(rows)) * math.prod(size[1:])
    if is_all and held != wanted:
        return f"its parts have {held} of {wanted} elements"
    filled = (shapes > 0).all(1).nonzero().squeeze(1)
    pair = _overlap(starts[filled], (starts + shapes)[filled])
    if pair is None:
        return None
    first, second = (_name(parts[int(filled[index])]) for index in pair)
    return f"two parts of it overlap: {first} and {second}"


def _matrix(rows: Iterable[Iterable[int]], dims: int) -> torch.Tensor:
    numbers = array("q", chain.from_iterable(rows))
    if not numbers:
        return torch.zeros(0, dims, dtype=torch.int64)
    return torch.frombuffer(numbers, dtype=torch.int64).view(-1, dims)


def _name(part: ChunkStorageMetadata) -> str:
    return f"{list(part.sizes)} at {list(part.offsets)}"


def _overlap(starts: torch.Tensor, stops: torch.Tensor) -> tuple[int, int] | None:
    """Find two boxes that overlap. All boxes have elements."""
    num, dims = starts.shape
    index, group = torch.arange(num), torch.zeros(num, dtype=torch.int64)
    num_groups, unchanged, dim = min(num, 1), 0, 0
    while len(index) and unchanged < dims:
        span = int(stops[:, dim].max()) + 1 if num else 1
        begin = group * span + starts[index, dim]
        begin, order = begin.sort()
        end = group[order] * span + stops[index[order], dim]
        index = index[order]
        is_first = torch.ones_like(begin, dtype=torch.bool)
        is_first[1:] = begin[1:] >= end.cummax(0).values[:-1]
        group = is_first.cumsum(0) - 1
        counts = group.bincount()
        unchanged = 0 if len(counts) > num_groups else unchanged + 1
        is_together = (counts > 1)[group]  # boxes that are alone overlap nothing
        index, group = index[is_together], group[is_together]
        group = torch.unique_consecutive(group, return_inverse=True)[1]
        num_groups = int(group[-1]) + 1 if len(group) else 0
        dim = (dim + 1) % dims
    for number in range(num_groups):
        boxes = [
            (first, starts[first].tolist(), stops[first].tolist())
            for first in index[group == number].tolist()
        ]
        for (first, start, stop), (second, second_start, second_stop) in combinations(boxes, 2):
            meets = zip(start, stop, second_start, second_stop)
            if all(a < d and c < b for a, b, c, d in meets):
                return first, second
    return None


class PartsByPlace:
    """The parts of a tensor of `size`, in the order of their first elements."""

    def __init__(self, size: Sequence[int], parts: Sequence[ChunkStorageMetadata]):
        self._parts = parts
        self._starts = _matrix((part.offsets for part in parts), len(size))
        self._stops = self._starts + _matrix((part.sizes for part in parts), len(size))
        limits = [0] * len(size) if not parts else self._stops.amax(0).tolist()
        self.limits: list[int] = limits
        self._strides = [math.prod(limits[dim + 1 :]) for dim in range(len(size))]
        strides = torch.tensor(self._strides, dtype=torch.int64)
        firsts, self._order = (self._starts * strides).sum(1).sort()
        lasts = ((self._stops - 1) * strides).sum(1)[self._order]
        self._firsts = array("q", firsts.tolist())
        self._lasts = array("q", lasts.cummax(0).values.tolist())

    def meeting(self, box: ChunkStorageMetadata) -> list[int]:
        starts = list(box.offsets)
        stops = [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]
        first = sum(start * stride for start, stride in zip(starts, self._strides))
        last = sum((stop - 1) * stride for stop, stride in zip(stops, self._strides))
        begin, end = bisect_right(self._lasts, first - 1), bisect_right(self._firsts, last)
        candidates = self._order[begin:end]
        if len(candidates) > _MANY and starts:
            is_met = self._starts[candidates] < torch.tensor(stops)
            is_met &= self._stops[candidates] > torch.tensor(starts)
            candidates = candidates[is_met.all(1)]
        return [index for index in candidates.tolist() if self._is_met(index, starts, stops)]

    def _is_met(self, index: int, starts: Sequence[int], stops: Sequence[int]) -> bool:
        part = self._parts[index]
        return all(
            start < offset + size and offset < stop and size and start < stop
            for offset, size, start, stop in zip(part.offsets, part.sizes, starts, stops)
        )


def create_read_items(
    name: str, stored: TensorStorageMetadata, boxes: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Return the reads for `boxes` of `name`, as torch's create_read_items_for_chunk_list does.

    Raises ValueError if the checkpoint lacks a part of a box that lies within the tensor.
    """
    if not boxes or not stored.chunks:
        return []
    parts, items = PartsByPlace(stored.size, stored.chunks), []
    for index, box in enumerate(boxes):
        # A run may ask for more rows than there are: Megatron pads vocabularies.
        missing = math.prod(
            max(0, min(offset + size, limit) - offset)
            for offset, size, limit in zip(box.offsets, box.sizes, parts.limits, strict=True)
        )
        for number in parts.meeting(box):
            part = stored.chunks[number]
            first = [max(pair) for pair in zip(box.offsets, part.offsets, strict=True)]
            ends = zip(box.offsets, box.sizes, part.offsets, part.sizes, strict=True)
            lengths = [min(a + b, c + d) - at for at, (a, b, c, d) in zip(first, ends)]
            missing -= math.prod(lengths)
            items.append(
                planner_helpers._create_read_item_for_tensor(
                    dest_index=MetadataIndex(name, box.offsets, index),
                    dest_offsets=[at - own for at, own in zip(first, box.offsets)],
                    storage_index=MetadataIndex(name, part.offsets, number),
                    storage_offsets=[at - own for at, own in zip(first, part.offsets)],
                    lengths=lengths,
                )
            )
        if missing:
            raise ValueError(f"the checkpoint holds only a part of {name}: {_name(box)}")
    return items


def check_plan(
    original: Callable[..., Any], plans: Sequence[SavePlan], index: Metadata
) -> list[str] | bool:
    """Check the plan of all ranks in place of torch's _validate_global_plan, which is `original`.

    Each tensor must be whole, with one size and dtype on all ranks that hold a part of it. A plan
    without a fault returns what `original` does, which depends on the version. Raises ValueError.
    """
    entries, faults = index.state_dict_metadata, []
    for item in chain.from_iterable(plan.items for plan in plans):
        entry, data = entries.get(item.index.fqn), item.tensor_data
        if data is None or not isinstance(entry, TensorStorageMetadata):
            continue
        if (entry.size, entry.properties.dtype) != (data.size, data.properties.dtype):
            faults.append(f"{item.index.fqn} has another size or dtype on another rank")
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            is_all = len(plans) > 1
            fault = find_fault(entry.size, entry.chunks, is_all, is_state_of_layers(name))
            faults += [] if fault is None else [f"{name}: {fault}"]
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"the ranks do not save whole tensors: {faults[0]}{more}")
    return original(plans, Metadata({}))


class SavePlanner(DefaultSavePlanner):
    """torch's planner of saves, in n log n of a model's parts instead of their square.

    It refuses a tensor that differs between ranks: the checkpoint would have one rank's for all.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        names = (it.index.fqn for it in self.plan.items if it.type == WriteItemType.TENSOR)
        words = {name: _describe(self.state_dict[name]) for name in names}
        compared = {name: each for name, each in words.items() if each is not None}
        # A plan that is equal to a cached one says nothing of values.
        return replace(self.plan if compared else plan, planner_data=(self.mappings, compared))

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _refuse_differences([plan.planner_data[1] for plan in all_plans])
        all_plans = [replace(plan, planner_data=plan.planner_data[0]) for plan in all_plans]
        plans, index = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        if self.flatten_state_dict:
            names = dict(ChainMap(*(plan.planner_data for plan in plans)))  # as torch does
            index = replace(index, planner_data=names)
        check_plan(lambda *_: [], plans, index)
        return plans, index


def _describe(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what all ranks have to agree on; None for numbers and integers, often a rank's own."""
    if not tensor.dim() or not tensor.is_floating_point() or tensor.layout != torch.strided:
        return None
    return tuple(tensor.shape), tensor.dtype, int(value_hash([tensor], tensor.device))


def _refuse_differences(all_tensors: Sequence[dict[str, tuple[Any, ...]]]) -> None:
    first: dict[str, tuple[int, tuple[Any, ...]]] = {}
    for rank, tensors in enumerate(all_tensors):
        for name, words in tensors.items():
            known, expected = first.setdefault(name, (rank, words))
            if words != expected:
                kind = "values" if words[:2] == expected[:2] else "a shape or dtype"
                raise ConfigurationError(
                    f"{name} has other {kind} on rank {rank} than on rank {known}, and a "
                    "checkpoint would have one rank's alone. Save parts of parameters with "
                    'sharded.state_dict(extra={"ema": {name: tensor}}), and other tensors of a '
                    "rank under a name with its rank."
                )


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner of loads, shown only the parts that this rank reads."""

    def create_local_plan(self) -> LoadPlan:
        index = self.metadata
        assert index is not None  # as in torch's
        own = self.state_dict.keys() & {"grad_record", "optim_keys"}
        if missing := own - index.state_dict_metadata.keys():
            raise ConfigurationError(
                f"the checkpoint has no {min(missing)}: it is not of this version's "
                "sharded.state_dict(); load its weights and moments under the names that it has, "
                "as docs/library.md does, Coming from fully_shard"
            )
        met = {
            name: _that_meet(stored, self.state_dict[name])
            for name, stored in index.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and name in self.state_dict
        }
        self.metadata = replace(index, state_dict_metadata={**index.state_dict_metadata, **met})
        try:
            return super().create_local_plan()
        finally:
            self.metadata = index


def _that_meet(stored: TensorStorageMetadata, wanted: Any) -> TensorStorageMetadata:
    boxes = getattr(wanted, "__create_chunk_list__", None)
    if boxes is None or len(stored.chunks) < _MANY:
        return stored
    parts = PartsByPlace(stored.size, stored.chunks)
    indices = sorted({index for box in boxes() for index in parts.meeting(box)})
    return replace(stored, chunks=[stored.chunks[index] for index in indices])
