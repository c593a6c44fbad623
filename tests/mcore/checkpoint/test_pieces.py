# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A rank's run of a parameter lands at the places of the checkpoint where Megatron would put it,
also where Megatron stores the parameter as something else than itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.shards import SHARDS_KEY, ChunkCheckpoint, find_stored_runs

PARAM = torch.arange(6 * 4, dtype=torch.float32).view(6, 4)


def whole(data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", data, replica_id=(0, 0, 0))


def layer_of_three(data: torch.Tensor) -> ShardedTensor:
    """As a transformer block stores its second layer: one more axis in front."""
    return ShardedTensor.from_rank_offsets(
        "w", data, (0, 1, 3), prepend_axis_num=1, replica_id=(0, 0, 0)
    )


def second_tensor_rank(data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", data, (0, 1, 2), replica_id=(0, 0, 0))


def gated(axis: int, prepend: int = 0) -> ShardedTensorFactory:
    """As a gated MLP is stored: two halves, each split over two tensor-parallel ranks."""

    def build(key, data, replica_id, flattened_range):
        layer = [(0, 1, 3)] if prepend else []
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *layer,
                (axis + prepend, rank, 4),
                replica_id=replica_id,
                prepend_axis_num=prepend,
            )
            for rank, half in zip((1, 3), torch.chunk(data, 2, dim=axis), strict=True)
        ]

    return ShardedTensorFactory("w", PARAM, build, torch.cat, (0, 0, 0))


ENTRIES = {
    "whole": whole(PARAM),
    "layer of three": layer_of_three(PARAM),
    "second tensor rank": second_tensor_rank(PARAM),
    "gated by rows": gated(0),
    "gated by rows, layer of three": gated(0, prepend=1),
    "gated by columns": gated(1),
    "gated by columns, layer of three": gated(1, prepend=1),
}


def written(entries: list[ShardedTensor]) -> torch.Tensor:
    """What the checkpoint's tensor holds after `entries`; NaN elsewhere."""
    stored = torch.full(entries[0].global_shape, torch.nan)
    for entry in entries:
        view = stored
        shape = (1,) * entry.prepend_axis_num + entry.local_shape
        for dim, (offset, size) in enumerate(zip(entry.global_offset, shape, strict=True)):
            view = view.narrow(dim, offset, size)
        assert bool(view.isnan().all()), "written twice"
        view.copy_(entry.data.view(view.shape))
    return stored


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@given(borders=st.lists(st.integers(0, PARAM.numel()), max_size=3))
def test_the_shards_of_all_ranks_write_what_megatron_writes(entry, borders):
    is_factory = isinstance(entry, ShardedTensorFactory)
    stock = list(nested_values(entry.build())) if is_factory else [entry]
    flat, cuts = PARAM.reshape(-1), [0, *sorted(borders), PARAM.numel()]
    ours = [
        shard
        for start, stop in zip(cuts, cuts[1:], strict=False)
        for piece in find_stored_runs(entry, PARAM)
        for shard in piece.shards(flat[start:stop], Range(start, stop), replica=0)
    ]
    assert torch.equal(written(ours).nan_to_num(-1), written(stock).nan_to_num(-1))
    assert all(shard.data.untyped_storage().data_ptr() == flat.data_ptr() for shard in ours)


@pytest.mark.parametrize("form", [lambda data: data.sum(0), lambda data: data + 1])
def test_a_form_that_is_not_a_part_of_the_parameter_is_refused(form):
    def build(key, data, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, form(data), replica_id=replica_id)]

    factory = ShardedTensorFactory("w", PARAM, build, torch.cat, (0, 0, 0))
    with pytest.raises(ConfigurationError, match="w is stored in a form that cannot be sharded"):
        find_stored_runs(factory, PARAM)


def test_a_shard_of_the_host_is_saved_from_where_it_lies():
    model = torch.nn.Linear(2, 2)
    model.sharded_state_dict = dict
    whole_buffer = torch.arange(12.0)
    part = ShardedTensor.from_rank_offsets("w", whole_buffer[2:8])
    (output,) = ChunkCheckpoint(None, model).as_state([part])[SHARDS_KEY].values()
    # Else Megatron's writer copies it.
    assert output.data.untyped_storage().nbytes() == output.data.numel() * output.data.itemsize
    assert output.data.data_ptr() == whole_buffer[2:].data_ptr()
    (copied,) = ChunkCheckpoint(None, model, snapshots=True).as_state([part])[SHARDS_KEY].values()
    whole_buffer.zero_()
    assert not output.data.any() and copied.data.all()
