# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients cut into pieces: every element is in one piece, at the place of its rank."""

import itertools

import pytest

from megatron_asynchzp.engine.sharding.layout import FlatLayout, grad_pieces

SHAPES = [((7,),), ((100,), (3, 5)), ((64,), (64,)), ((300,), (1,), (20, 10)), ((130,), (513,))]


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_reduce_scatter_of_every_piece_is_one_of_the_whole(shapes):
    layout_of = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    for num_shards, times, slot_nbytes in itertools.product((1, 2, 3, 4), (1, 2), (1, 700, 2**20)):
        layout = FlatLayout.build(layout_of, num_shards * times)
        shard = layout.padded_numel // num_shards
        scattered = {}  # (rank, element of its shard): what is there
        for piece in grad_pieces(layout, num_shards, slot_nbytes):
            content = [None] * piece.numel
            for copy in piece.copies:
                whole = layout.slices[copy.index].range
                source = copy.source or (0, whole.numel)
                for element, target in zip(range(*source), range(*copy.target), strict=True):
                    assert content[target] is None
                    content[target] = whole.start + element
            for gap in piece.gaps:
                for place in range(*gap):
                    assert content[place] is None
                    content[place] = "gap"
            length = piece.part.numel
            for place, what in enumerate(content):
                key = place // length, piece.part.start + place % length
                assert key not in scattered and what is not None
                scattered[key] = what
        of_params = {i for piece in layout.slices for i in range(*piece.range)}
        assert scattered == {
            (i // shard, i % shard): i if i in of_params else "gap"
            for i in range(layout.padded_numel)
        }


def test_pieces_are_no_larger_than_a_slot_of_equal_size_and_one_where_that_is_enough():
    layout = FlatLayout.build([("p", (10_000,))], 4)
    for slot_nbytes in (4 * 256, 3000, 10_000, 39_999, 4 * layout.padded_numel):
        pieces = grad_pieces(layout, 4, slot_nbytes)
        assert all(4 * piece.numel <= slot_nbytes for piece in pieces)
        assert len({piece.numel for piece in pieces[:-1]}) <= 1
    assert len(pieces) == 1 and pieces[0].copies[0].source is None
