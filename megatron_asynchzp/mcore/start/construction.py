# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds Megatron's models in shards: when that begins, and which modules are complete when."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.shard_groups import (
    broadcast_from_first_rank,
    communication_device,
    create_shard_groups,
)
from megatron_asynchzp.mcore.start.units import (
    EDGES,
    is_language_model,
    is_layer,
    sharding_group_key,
)

# The model that this process builds now.
_CONSTRUCTION: ContextVar[Construction | None] = ContextVar("asynchzp_construction", default=None)


@contextmanager
def constructing(
    settings: RunSettings,
    pg_collection: ProcessGroupCollection,
    has_experts: bool,
    reshards: bool = False,
) -> Iterator[Construction]:
    """Shard layers and edges as soon as each is built. Collective; has_experts is world-wide.

    See Construction for reshards.
    """
    groups = create_shard_groups(settings, pg_collection, has_experts)

    def use_first_rank(param: nn.Parameter) -> None:
        broadcast_from_first_rank(param, pg_collection)

    construction = Construction(
        groups,
        sharding_group_key,
        communication_device(pg_collection.dp_cp),
        use_first_rank if settings.starts_differ else None,
        reshards,
    )
    token = _CONSTRUCTION.set(construction)
    hook = register_module_module_registration_hook(_note_registered)
    try:
        yield construction
    finally:
        hook.remove()
        _CONSTRUCTION.reset(token)


def current_construction() -> Construction | None:
    return _CONSTRUCTION.get()


def note_built(module: Any) -> None:
    """Shard `module` if it is a layer: Megatron has built it from its spec."""
    construction = _CONSTRUCTION.get()
    if construction is not None and is_layer(module):
        construction.shard(module)


def _note_registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Shard a language model's embedding or output layer when it is registered: it is complete."""
    construction = _CONSTRUCTION.get()
    if construction is None or module is None or name not in EDGES or not is_language_model(parent):
        return
    # A tied embedding is a unit without its positions.
    words: Any = getattr(module, "word_embeddings", None)
    is_tied = getattr(parent, "share_embeddings_and_output_weights", False)
    alone = {words.weight} if is_tied and words is not None else ()
    construction.shard(module, alone=alone)
