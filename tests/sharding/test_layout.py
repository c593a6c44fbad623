# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Offsets of parameters in flat buffers, and what a shard holds of each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.sharding.layout import PARAM_ALIGNMENT_NUMEL, FlatLayout
from megatron_asynchzp.engine.sharding.topology import Range

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8
)


def layout_of(list_of_shapes, num_shards: int) -> FlatLayout:
    return FlatLayout.build(((f"p{i}", s) for i, s in enumerate(list_of_shapes)), num_shards)


@given(shapes, st.integers(1, 12))
def test_parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides(given_shapes, shards):
    layout = layout_of(given_shapes, shards)
    end = 0
    for piece in layout.slices:
        assert piece.range.start % PARAM_ALIGNMENT_NUMEL == 0
        assert piece.range.start >= end
        end = piece.range.stop
    assert layout.padded_numel >= end
    assert layout.padded_numel % (shards * PARAM_ALIGNMENT_NUMEL) == 0
    bound = PARAM_ALIGNMENT_NUMEL * (len(given_shapes) + shards)
    assert layout.padded_numel - layout.numel <= bound


@given(shapes, st.integers(1, 6), st.integers(0, 5))
def test_a_shard_filled_from_parameters_holds_exactly_its_part_of_each(given_shapes, shards, which):
    layout = layout_of(given_shapes, shards)
    params = [torch.arange(1.0, 1 + torch.Size(s).numel()).view(s) for s in given_shapes]
    length = layout.padded_numel // shards
    start = which % shards * length
    whole = FlatBuffer(layout, Range(0, layout.padded_numel), torch.empty(layout.padded_numel))
    whole.copy_params(params)
    shard = FlatBuffer(layout, Range(start, start + length), torch.full((length,), 7.0))
    shard.copy_params(params)
    assert torch.equal(shard.storage, whole.storage[start : start + length])
    for view, param in zip(whole.param_views(), params, strict=True):
        assert torch.equal(view, param)
    assert whole.storage.sum() == sum(p.sum() for p in params)
    held = sum(view.numel() for view in shard.fragment_views())
    assert held == sum(r.numel for r in layout.fragments(shard.range))


def test_a_layout_depends_on_shapes_and_shards_alone_not_on_names():
    one = FlatLayout.build([("embedding.weight", (17, 3))], 4)
    other = FlatLayout.build([("output_layer.weight", (17, 3))], 4)
    assert [s.range for s in one.slices] == [s.range for s in other.slices]
    assert one.padded_numel == other.padded_numel


def test_a_parameter_named_twice_is_refused():
    with pytest.raises(ValueError, match="named twice"):
        FlatLayout.build([("w", (2,)), ("w", (3,))], 1)
