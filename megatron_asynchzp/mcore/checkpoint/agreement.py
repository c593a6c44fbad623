# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that the shards of all ranks make up whole tensors and objects.

[Note: a sum in place of everybody's list]
Megatron gathers the descriptions of all shards of all ranks on each of them, for rank 0 to look for
what is missing or there twice. Each of our shards has a random number that follows from the key,
dtype and shape of its whole, times its elements; the one with the first element counts against it
the number times the elements of the whole. The sum over all ranks is zero where each whole is
there once. Where it is not, Megatron's own exchange says what is wrong.

The sum does not see where shards lie. What a save writes where is compared by the check of its plan
(checkpoint_files/parts.py); what a load reads is compared box by box.
"""

import hashlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_asynchzp.mcore.checkpoint.save_ranks import is_saved_shared

_NUM_SUMS = 2


class Agreed(list):
    """What Megatron is given in place of the descriptions of all ranks, which are whole together:
    those of this rank alone."""


def needs_all(args: Namespace) -> bool:
    """Whether a load is to report what the checkpoint has and no rank asks for."""
    strict = StrictHandling(args.dist_ckpt_strictness)
    return not is_saved_shared() and StrictHandling.requires_global_app_metadata(strict)


def exchange(
    gather: Callable[[], tuple[list, list]], state: Any, group: Any, device: torch.device
) -> tuple[list, list]:
    """The descriptions of this rank's shards in `state`, and Agreed where those of all ranks of
    `group` (None: the world) are whole, else of all ranks, by `gather`. Collective."""
    mine = [shard.without_data() for shard in nested_values(state)]
    sums = torch.tensor(_sums(mine), dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    return gather() if bool(sums.any()) else (mine, Agreed([mine]))


def _sums(shards: Iterable[ShardedTensor | ShardedObject]) -> list[int]:
    sums = [0] * _NUM_SUMS
    for shard in shards:
        if not is_main_replica(shard.replica_id):
            continue
        is_tensor = isinstance(shard, ShardedTensor)
        held = prod(shard.local_shape) if is_tensor else 1
        if not any(shard.global_offset) and held:
            held -= prod(shard.global_shape)
        kind = str(shard.dtype) if is_tensor else "object"
        whole = repr((shard.key, kind, tuple(shard.global_shape)))
        digest = hashlib.sha256(whole.encode()).digest()
        for number in range(_NUM_SUMS):
            sums[number] += held * int.from_bytes(digest[8 * number :][:8], "little")
    # As the sum of the ranks does, modulo 2 ** 64.
    return [(one + 2**63) % 2**64 - 2**63 for one in sums]
