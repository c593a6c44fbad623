# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the tensors that a checkpoint of a partly frozen model may leave to another one.

A save leaves the frozen tensors (--asynchzp-save-trained-only), a base the adapters added to it.
"""

from collections.abc import Collection, Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)

from megatron_asynchzp.mcore.checkpoint.shards import FROZEN_KEY, SHARDS_KEY


def is_trained_only(saved: Any) -> bool:
    return bool(getattr(saved, "asynchzp_save_trained_only", False))


def is_partly_frozen(state: Any) -> bool:
    """Return whether a model chunk in this sharded state dict has frozen and trained tensors."""
    return any({SHARDS_KEY, FROZEN_KEY} <= chunk.keys() for chunk in _chunks(state))


def drop_frozen(state: Any) -> None:
    for chunk in _chunks(state):
        chunk.pop(FROZEN_KEY, None)


def keep_frozen(state: Any) -> None:
    for chunk in _chunks(state):
        _keep(chunk.get(FROZEN_KEY, {}), ())


def keep_new(state: Any, there: Collection[str]) -> set[str]:
    """Keep the values of trained tensors that the checkpoint lacks, if a part is frozen.

    there has the names in the checkpoint. Returns the keys of the kept tensors.
    """
    new: set[str] = set()
    for chunk in _chunks(state):
        if FROZEN_KEY in chunk:
            new |= _keep(chunk.get(SHARDS_KEY, {}), there)
            for name, entry in chunk.items():  # their modules' other states
                if isinstance(entry, ShardedObject) and entry.unique_key not in there:
                    chunk[name] = LocalNonpersistentObject(entry.data)
    return new


def _chunks(state: Any) -> Iterator[dict[str, Any]]:
    for key, part in state.items():
        if str(key).startswith("model") and isinstance(part, dict):
            yield part


def _keep(shards: dict[str, Any], there: Collection[str]) -> set[str]:
    """Remove shards that are not in `there` and return their keys; a load keeps their values."""
    kept: set[str] = set()
    for index, shard in shards.items():
        if isinstance(shard, ShardedTensor) and shard.key not in there:
            shards[index] = LocalNonpersistentObject(shard.data)
            kept.add(shard.key)
    return kept
