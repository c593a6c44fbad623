# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Proves that the shards of all ranks make up whole tensors and objects.

[Note: a sum in place of a list of all shards]
Megatron gathers the descriptions of all shards on each rank, and rank 0 looks for missing and
repeated ones. Here each shard has a random number, derived from its whole's key, dtype and shape,
times its elements; the shard with the first element subtracts the number times the elements of the
whole. The sum over all ranks is zero if each whole is there once or several times, so the numbers
of the wholes are compared too, each from the rank with the first element. If the sum is not zero or
two numbers are equal, Megatron's own exchange finds the fault.

The sum does not see where shards lie. The check of a save's plan (checkpoint_files/parts.py) and
the comparison of boxes in a load do.
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

from megatron_asynchzp.mcore.checkpoint.operation import is_shared_save


class Agreed(list):
    """This rank's descriptions in place of all ranks': together they are whole."""


def needs_all(args: Namespace) -> bool:
    """Return whether a load reports tensors of the checkpoint that no rank asks for."""
    strict = StrictHandling(args.dist_ckpt_strictness)
    return not is_shared_save() and StrictHandling.requires_global_app_metadata(strict)


def exchange(
    gather: Callable[[], tuple[list, list]], state: Any, group: Any, device: torch.device
) -> tuple[list, list]:
    """Return Agreed if the shards of `group` are whole, else all by `gather`. Collective."""
    mine = [shard.without_data() for shard in nested_values(state)]
    return (mine, Agreed([mine])) if _are_whole(mine, group, device) else gather()


def _are_whole(
    shards: Iterable[ShardedTensor | ShardedObject], group: Any, device: torch.device
) -> bool:
    rest, firsts = 0, []
    for shard in shards:
        if not is_main_replica(shard.replica_id):
            continue
        is_tensor = isinstance(shard, ShardedTensor)
        kind = str(shard.dtype) if is_tensor else "object"
        number = _number_of((shard.key, kind, tuple(shard.global_shape)))
        held = prod(shard.local_shape) if is_tensor else 1
        if held and not any(shard.global_offset):
            held -= prod(shard.global_shape)
            firsts.append(_as_int64(_number_of(shard.key)))
        rest += held * number
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.zeros(size + 1, dtype=torch.int64)
    counts[rank], counts[size] = len(firsts), _as_int64(rest)
    counts = counts.to(device)
    dist.all_reduce(counts, group=group)  # modulo 2 ** 64
    *lengths, total = counts.tolist()
    if total != 0 or not any(lengths):
        return total == 0
    numbers = torch.zeros(sum(lengths), dtype=torch.int64)
    start = sum(lengths[:rank])
    numbers[start : start + len(firsts)] = torch.tensor(firsts, dtype=torch.int64)
    numbers = numbers.to(device)
    dist.all_reduce(numbers, group=group)
    return len(set(numbers.tolist())) == len(numbers)


def _number_of(whole: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(whole).encode()).digest()[:8], "little")


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
