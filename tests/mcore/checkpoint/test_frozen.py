# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a sharded state dict asks a checkpoint for where a part of the model is frozen."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

from megatron_asynchzp.mcore.checkpoint.frozen import drop_frozen, keep_frozen, keep_new
from megatron_asynchzp.mcore.checkpoint.mismatch import wanted_tensors
from megatron_asynchzp.mcore.checkpoint.shards import FROZEN_KEY, SHARDS_KEY


def state(*trained: str, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of one model chunk and of its optimizer."""
    shards = [
        {str(i): ShardedTensor.from_rank_offsets(key, torch.ones(4)) for i, key in enumerate(keys)}
        for keys in (trained, frozen, trained)
    ]
    chunk = {SHARDS_KEY: shards[0]} | ({FROZEN_KEY: shards[1]} if frozen else {})
    return {"model": chunk, "optimizer": {SHARDS_KEY: shards[2]}}


def wanted(asked: dict[str, Any]) -> set[str]:
    return {one.key for one in wanted_tensors(asked["model"])}


def test_a_save_of_what_is_trained_has_no_frozen_tensor():
    saved = state("a", frozen=("w",))
    drop_frozen(saved)
    assert wanted(saved) == {"a"} and SHARDS_KEY in saved["optimizer"]


def test_a_load_of_what_is_trained_asks_for_no_frozen_tensor_and_hands_their_values_back():
    asked = state("a", frozen=("w",))
    values = asked["model"][FROZEN_KEY]["0"].data
    keep_frozen(asked)
    assert wanted(asked) == {"a"}
    kept = asked["model"][FROZEN_KEY]["0"]
    assert isinstance(kept, LocalNonpersistentObject) and kept.unwrap() is values


def test_only_what_a_base_lacks_of_the_trained_tensors_starts_anew():
    asked = state("a", "b", frozen=("v", "w"))
    assert keep_new(asked, {"b", "v"}) == {"a"}
    assert wanted(asked) == {"b", "v", "w"}


def test_nothing_may_be_missing_where_all_is_trained():
    asked = state("a", "b")
    assert keep_new(asked, {"b"}) == set() and wanted(asked) == {"a", "b"}
