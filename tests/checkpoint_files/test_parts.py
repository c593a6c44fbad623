# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The check of a plan and the lookup of a load say what torch's say, in time that grows with the
parts and not with their square."""

import random
import time
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_asynchzp.checkpoint_files.parts import (
    check_plan,
    create_read_items,
    find_fault,
    is_state_of_layers,
)
from megatron_asynchzp.engine.sharding.layout import cut_into_boxes
from megatron_asynchzp.engine.sharding.topology import Range

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def part(offsets, sizes) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def runs_in_a_grid(size, grid, borders) -> list[ChunkStorageMetadata]:
    """Each cell of a grid (tensor-parallel ranks) cut into runs of its elements (our ranks)."""
    cell = [whole // number for whole, number in zip(size, grid, strict=True)]
    numel = torch.Size(cell).numel()
    cuts = sorted({0, numel, *(border % (numel + 1) for border in borders)})
    return [
        part([a * c + b for a, c, b in zip(place, cell, box.offset)], box.shape)
        for place in product(*map(range, grid))
        for start, stop in zip(cuts, cuts[1:], strict=False)
        for box in cut_into_boxes(cell, Range(start, stop))
    ]


@st.composite
def tilings(draw):
    grid = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    size = [number * draw(st.integers(1, 4)) for number in grid]
    parts = runs_in_a_grid(size, grid, draw(st.lists(st.integers(0, 60), max_size=5)))
    return size, draw(st.permutations(parts))


def judged_by_torch(size, parts) -> bool:
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(size), list(parts))
    return not default_planner._validate_global_plan([1, 2], Metadata({"w": stored}))


@QUICK
@given(tilings(), st.integers(0, 10**6), st.sampled_from(["none", "drop", "twice", "move", "grow"]))
def test_a_tensor_is_whole_where_torch_says_so(tiling, choice, harm):
    size, parts = tiling[0], list(tiling[1])
    index = choice % len(parts)
    one, dim = parts[index], choice % len(size)
    if harm == "drop":
        parts.pop(index)
    elif harm == "twice":
        parts.append(one)
    elif harm != "none":
        offsets, sizes = list(one.offsets), list(one.sizes)
        (offsets if harm == "move" else sizes)[dim] += 1
        parts[index] = part(offsets, sizes)
    fault = find_fault(size, parts)
    assert (fault is None) == judged_by_torch(size, parts) == (harm == "none"), fault


def test_parts_that_no_cut_takes_apart_are_compared_in_pairs():
    wheel = [
        part((0, 0), (1, 2)),
        part((0, 2), (2, 1)),
        part((2, 1), (1, 2)),
        part((1, 0), (2, 1)),
        part((1, 1), (1, 1)),
    ]
    assert find_fault((3, 3), wheel) is None
    shifted = [*wheel[:4], part((0, 1), (1, 1))]
    assert "overlap" in str(find_fault((3, 3), shifted))


LONG = part((0, 0), (10, 1))
SHORT = [part((row, 1), (1, 1)) for row in range(10)]


def test_a_long_part_beside_short_ones_overlaps_what_lies_within_it():
    assert find_fault((10, 2), [LONG, *SHORT]) is None
    boxes = [LONG, part((1, 1), (1, 1)), part((3, 0), (1, 1)), part((2, 1), (8, 1))]
    for order in permutations(boxes):  # they have as many elements as the tensor
        fault = find_fault((10, 2), order)
        assert "overlap" in str(fault) and "[10, 1]" in str(fault) and "[3, 0]" in str(fault)


@pytest.mark.parametrize("row", range(10))
def test_a_long_part_beside_short_ones_is_read_from_its_last_rows_too(row):
    stored = TensorStorageMetadata(TensorProperties(), torch.Size((10, 2)), [*SHORT, LONG])
    for box in (part((row, 0), (1, 1)), part((row, 0), (10 - row, 2))):
        ours = create_read_items("w", stored, [box])
        assert read_by(ours) == read_by(create_read_items_for_chunk_list("w", stored, [box]))


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([part((-1, 0), (2, 2))], "outside"),
        ([part((0, 0), (2, 2**62))], "outside"),
        ([part((2**62, 0), (2**62, 2))], "outside"),
        ([part((0,), (4,))], "dimensions"),
        ([part((0, 0), (1, 2))], "2 of 4 elements"),
        ([part((0, 0), (1, 2)), part((0, 0), (1, 2))], "overlap"),
        ([], "0 of 4 elements"),
    ],
)
def test_a_fault_is_named(parts, word):
    assert word in str(find_fault((2, 2), parts))


def test_a_stack_of_layers_lacks_whole_layers_alone():
    pieces = [part((row, column), (1, 2)) for row in range(3) for column in (0, 2)]
    for kept in product([False, True], repeat=len(pieces)):
        parts = [piece for piece, is_kept in zip(pieces, kept, strict=True) if is_kept]
        is_of_layers = any(kept) and all(kept[row] == kept[row + 1] for row in (0, 2, 4))
        assert (find_fault((3, 4), parts, lacks_rows=True) is None) == is_of_layers, kept
        assert (find_fault((3, 4), parts) is None) == all(kept)
    assert find_fault((3, 4), [part((0, 0), (2, 4))], lacks_rows=True) is None
    twice = [part((0, 0), (2, 4)), *pieces[2:4]]
    for parts in (twice, twice[:2]):
        assert "of 8 elements" in str(find_fault((3, 4), parts, lacks_rows=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", True),
        ("chained_0.optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", True),
        ("optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc1.weight", False),
        ("optimizer.state.exp_avg.output_layer.weight", False),
        ("decoder.layers.mlp.linear_fc1.weight", False),
    ],
)
def test_only_states_of_stacked_layers_may_lack_layers(name, expected):
    assert is_state_of_layers(name) == expected


def test_a_number_is_stored_once():
    assert find_fault((), [part((), ())]) is None
    assert find_fault((), []) and find_fault((), [part((), ())] * 2)
    # Of a rank's own parts, which need not be all.
    assert find_fault((), [], is_all=False) is None
    assert find_fault((), [part((), ())], is_all=False) is None
    assert find_fault((), [part((), ())] * 2, is_all=False) == "its one element is stored 2 times"


def read_by(reads) -> set[tuple]:
    return {
        (
            *(one.dest_index.offset, one.dest_offsets, one.storage_index.offset),
            *(one.storage_offsets, one.lengths),
        )
        for one in reads
    }


@QUICK
@given(tilings(), st.data())
def test_a_rank_reads_what_it_reads_with_torch(tiling, data):
    size, parts = tiling
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(size), list(parts))
    numel = torch.Size(size).numel()
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    boxes = [part(box.offset, box.shape) for box in cut_into_boxes(size, Range(start, stop))]
    ours = create_read_items("w", stored, boxes)
    assert read_by(ours) == read_by(create_read_items_for_chunk_list("w", stored, boxes))
    assert sum(one.lengths.numel() for one in ours) == stop - start
    stored.chunks.pop(data.draw(st.integers(0, len(parts) - 1)))
    try:
        left = create_read_items("w", stored, boxes)
    except ValueError as error:
        assert "only a part of w" in str(error)
    else:  # what is gone was not asked for, or lay beyond all others, where a vocabulary is padded
        assert read_by(left) == read_by(create_read_items_for_chunk_list("w", stored, boxes))


def saved(*items) -> tuple[list[SavePlan], Metadata]:
    """The plans of ranks that save a part each: (offsets, sizes, size, dtype)."""
    plans, entries = [], {}
    for offsets, sizes, size, dtype in items:
        data = TensorWriteData(part(offsets, sizes), TensorProperties(dtype), torch.Size(size))
        index = MetadataIndex("w", torch.Size(offsets))
        plans.append(SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data)]))
        entry = TensorStorageMetadata(data.properties, data.size, [])
        entries.setdefault("w", entry).chunks.append(data.chunk)
    return plans, Metadata(entries)


def test_ranks_that_save_other_tensors_under_one_name_are_refused():
    half = ((2,), (4,), torch.float32)
    assert not check_plan(
        default_planner._validate_global_plan, *saved(((0,), *half), ((2,), *half))
    )
    for other in (((2,), (5,), torch.float32), ((2,), (4,), torch.bfloat16)):
        with pytest.raises(ValueError, match="w has another size or dtype on another rank"):
            check_plan(lambda *_: [], *saved(((0,), *half), ((2,), *other)))
    with pytest.raises(ValueError, match="w: its parts have 2 of 4 elements"):
        check_plan(lambda *_: [], *saved(((0,), *half), ((0,), (0,), *half[1:])))


@pytest.mark.parametrize("number, more", [(1, "$"), (2, ", and 1 more$"), (4, ", and 3 more$")])
def test_of_several_tensors_with_a_fault_the_first_is_named_and_the_others_counted(number, more):
    (plan, _), index = saved(((0,), (2,), (4,), torch.float32), ((2,), (2,), (4,), torch.float32))
    half = index.state_dict_metadata["w"]
    half.chunks.pop()
    plans = [plan, SavePlan([])]
    tensors = {f"w{place}": half for place in range(number)}
    words = f"whole tensors: w0: its parts have 2 of 4 elements{more}"
    with pytest.raises(ValueError, match=words):
        check_plan(lambda *_: [], plans, Metadata(tensors))


def seconds_for(num_ranks: int) -> float:
    """CPU time of the check and of one rank's lookup for a wide matrix cut over so many ranks."""
    rows, columns = 64, 1 << 20
    length = rows * columns // num_ranks
    boxes = [
        part(box.offset, box.shape)
        for rank in range(num_ranks)
        for box in cut_into_boxes((rows, columns), Range(rank * length, (rank + 1) * length))
    ]
    random.Random(0).shuffle(boxes)
    stored = TensorStorageMetadata(TensorProperties(), torch.Size((rows, columns)), boxes)
    start = time.process_time()
    assert find_fault((rows, columns), boxes) is None
    assert len(create_read_items("w", stored, boxes[:4])) == 4
    return time.process_time() - start


def test_the_time_grows_with_the_parts_and_not_with_their_square():
    assert seconds_for(1 << 15) < 15  # in pairs a minute
