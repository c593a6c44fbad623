# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Describes how ranks hold a model, each tensor cut into boxes, who sends a box, and joins them."""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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


Holders = tuple[int, ...]
"""Global ranks that hold, or can gather, the same tensor, in the order of their group."""


class Routes:
    """The holder from which each receiver takes a tensor.

    A receiver that holds the tensor takes its own. Any other takes it from the holder whose place
    among the holders is the receiver's among its replicas. So if all ranks receive, every copy of
    the model supplies itself, and the holders serve equally many receivers. Ranks are global; each
    is in one group of `replicas`, which hold the same part of a model.
    """

    def __init__(self, receivers: Iterable[int], replicas: Iterable[Holders]):
        self.receivers = tuple(sorted(receivers))
        self._place = {
            rank: (place, len(group)) for group in replicas for place, rank in enumerate(group)
        }
        self._sources: dict[Holders, dict[int, int]] = {}

    def sources(self, holders: Holders) -> dict[int, int]:
        if holders not in self._sources:
            self._sources[holders] = {
                receiver: self._source(holders, receiver) for receiver in self.receivers
            }
        return self._sources[holders]

    def _source(self, holders: Holders, receiver: int) -> int:
        if receiver in holders:
            return receiver
        place, count = self._place[receiver]
        return holders[place * len(holders) // count]

    def serves(self, holders: Holders, ranks: Collection[int]) -> bool:
        return not set(self.sources(holders).values()).isdisjoint(ranks)


def sharing_block(holders: Sequence[int], rank: int, shard_size: int) -> Sequence[int]:
    """Return the holders that share a copy of a state with `rank`, which gather it together."""
    start = holders.index(rank) // shard_size * shard_size
    return holders[start : start + shard_size]


class Parcel(NamedTuple):
    """A tensor on its way from a rank to another."""

    source: int
    receiver: int
    tensor: torch.Tensor  # contiguous: the values on `source`, the memory for them on `receiver`


def deliver(parcels: Sequence[Parcel]) -> None:
    """Send and receive the parcels of this rank, and wait until their tensors may be used.

    Parcels between the same two ranks must come in the same order on both.
    """
    rank = dist.get_rank()
    operations = [
        dist.P2POp(dist.isend, parcel.tensor, parcel.receiver)
        if parcel.source == rank
        else dist.P2POp(dist.irecv, parcel.tensor, parcel.source)
        for parcel in parcels
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
