# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One sum says whether the shards of all ranks are whole; what it refuses Megatron explains."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)

from megatron_asynchzp.mcore.checkpoint.agreement import Agreed, exchange
from tests.support.world import on_ranks


def state_of(rank: int) -> dict:
    """Two shards of a tensor, one of them with a layer's index in front, an object a rank, and what
    both have, which the first rank writes."""
    whole = torch.arange(6.0)
    return {
        "a": ShardedTensor.from_rank_offsets("a", whole, (0, rank, 2)),
        "b": ShardedTensor.from_rank_offsets("b", whole, (0, rank, 2), prepend_axis_num=1),
        "object": ShardedObject("object", rank, (2,), (rank,)),
        "both": ShardedTensor.from_rank_offsets("both", whole, replica_id=rank),
    }


def drop(state, rank):
    if rank == 1:
        del state["a"]


def drop_first(state, rank):
    if rank == 0:
        del state["b"]


def write_twice(state, rank):
    state["both"] = replace(state["both"], replica_id=0)


def other_dtype(state, rank):
    if rank == 1:
        state["a"] = replace(state["a"], dtype=torch.float64, data=state["a"].data.double())


def other_shape(state, rank):
    if rank == 1:
        state["a"] = replace(state["a"], global_shape=(18,), axis_fragmentations=(3,))


def object_twice(state, rank):
    state["object"] = replace(state["object"], global_offset=(0,))


def object_missing(state, rank):
    if rank == 1:
        del state["object"]


HARM = (drop, drop_first, write_twice, other_dtype, other_shape, object_twice, object_missing)


def original(function):
    """Megatron's own, also where it is replaced."""
    return getattr(function, "__wrapped__", function)


def judge_all() -> dict:
    rank, found = dist.get_rank(), {}
    for harm in (None, *HARM):
        state, gathers, error = state_of(rank), [], None
        if harm is not None:
            harm(state, rank)

        def gather(state=state, gathers=gathers):
            gathers.append(1)
            return original(determine_global_metadata)(state)

        _, everything = exchange(gather, state, None, torch.device("cpu"))
        try:
            if gathers:
                original(validate_sharding_integrity)(everything)
        except (CheckpointingException, AssertionError) as caught:
            error = type(caught).__name__
        name = "whole" if harm is None else harm.__name__
        found[name] = (isinstance(everything, Agreed), len(gathers), error)
    return found


@pytest.fixture(scope="module")
def verdicts() -> list[dict]:
    return on_ranks(judge_all, 2)


def test_whole_tensors_and_objects_are_known_from_a_sum(verdicts):
    assert [one["whole"] for one in verdicts] == [(True, 0, None)] * 2


@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_whole_is_gathered_and_refused_by_megatron(verdicts, harm):
    first, second = (one[harm.__name__] for one in verdicts)
    assert first[:2] == second[:2] == (False, 1)
    assert first[2] is not None  # rank 0 looks
