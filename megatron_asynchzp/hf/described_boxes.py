# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the parts of a model on a rank from Megatron's sharded_state_dict, for any parallelism."""

import sys
from collections.abc import Sequence

import torch

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.marks import unpacked
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.hf.held_boxes import Address, HeldBox
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel


def described_boxes(model: Sequence[AsyncHZPDataParallel]) -> list[HeldBox]:
    """Return the boxes of each sharding group in which this rank is the first, between two steps.

    Raises:
        ConfigurationError: A checkpoint cannot hold a parameter.
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
