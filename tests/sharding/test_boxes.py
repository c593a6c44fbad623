# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run of elements is cut into boxes that hold exactly those elements, in order, and few."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.sharding.layout import cut_into_boxes
from megatron_asynchzp.engine.sharding.topology import Range

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shapes_and_ranges(draw) -> tuple[tuple[int, ...], Range]:
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, Range(start, draw(st.integers(start, prod(shape))))


@given(shapes_and_ranges())
def test_the_boxes_are_the_elements_of_the_range_one_after_another(case):
    shape, part = case
    elements = torch.arange(prod(shape)).view(shape)
    found = []
    for box in cut_into_boxes(shape, part):
        view = elements
        for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
            view = view.narrow(dim, offset, size)
        assert view.reshape(-1).tolist() == list(range(box.range.start, box.range.stop))
        found += range(box.range.start, box.range.stop)
    assert found == list(range(part.start, part.stop))


@given(shapes_and_ranges())
def test_there_are_at_most_two_boxes_per_dim_less_one(case):
    shape, part = case
    assert len(cut_into_boxes(shape, part)) <= max(1, 2 * len(shape) - 1)


@given(shapes)
def test_a_whole_tensor_is_one_box(shape):
    boxes = cut_into_boxes(shape, Range(0, prod(shape)))
    assert [(box.offset, box.shape) for box in boxes] == [((0,) * len(shape), shape)]


@given(shapes, st.integers(1, 6))
def test_shards_of_all_ranks_partition_the_tensor(shape, num_ranks):
    numel = prod(shape)
    borders = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
    covered = torch.zeros(shape, dtype=torch.int)
    for start, stop in pairwise(borders):
        for box in cut_into_boxes(shape, Range(start, stop)):
            view = covered
            for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
                view = view.narrow(dim, offset, size)
            view += 1
    assert bool((covered == 1).all())
