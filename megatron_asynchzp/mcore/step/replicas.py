# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compares bits of replicas (--check-weight-hash-across-dp-replicas-interval)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import AxisGroup, all_reduce_steps, run_steps
from megatron_asynchzp.engine.sharding.value_hash import value_hash
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import name_ranks


class ReplicasDiffer(RuntimeError):
    """Raised when replicas of a state differ; the message is a line for the user."""


@torch.no_grad()
def compare_replicas(
    runtimes: Sequence[HZPRuntime],
    moments_of: Callable[[HZPUnit], Sequence[torch.Tensor]],
    step: int,
) -> None:
    """Compare parameter shards, main parameters and moments, between two steps. Collective.

    Replicas exchange 16 bytes per state and unit. Raises ReplicasDiffer on all ranks, with one
    message, which names the last `step`. moments_of: each 1-D, in a fixed order.
    """
    # Imported here, because a launch needs ReplicasDiffer before it has checked Megatron.
    from megatron_asynchzp.mcore.start.units import units_by_groups

    differences: list[str] = []
    for runtime in runtimes:
        runtime.settle()
        for groups, units in units_by_groups(runtime.units).items():
            trained = [unit for unit in units if unit.is_trained]
            param_size = groups.topology.sizes.param
            holders = [shard for shard in groups.all_reduce_axes if shard.axis.stride >= param_size]
            copies = groups.replica_sync
            differences += _differing(
                "parameters", units, lambda shard: [shard.model_param.storage], holders
            )
            differences += _differing(
                "main parameters", trained, lambda shard: [shard.main_param.storage], copies
            )
            differences += _differing("optimizer states", trained, moments_of, copies)
    # The others would wait for the ranks that see a difference.
    num_hits = torch.tensor(len(differences), device=runtimes[0].units[0].device)
    dist.all_reduce(num_hits, dist.ReduceOp.MAX)
    if not num_hits.item():
        return
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, differences)
    first, *others = dict.fromkeys(text for texts in of_ranks for text in texts)
    more = f", and so do {len(others)} more states" if others else ""
    raise ReplicasDiffer(
        f"after step {step} replicas differ: {first}{more}; a bit has changed in memory or on the "
        "wire: go on from an earlier checkpoint, and test the devices of these ranks"
    )


def _differing(
    state: str,
    units: Sequence[HZPUnit],
    states_of: Callable[[HZPUnit], Iterable[torch.Tensor]],
    axes: Sequence[AxisGroup],
) -> list[str]:
    if not units or not axes:
        return []
    device = units[0].device
    own = torch.stack([value_hash(states_of(unit), device) for unit in units])
    num_holders, index = 1, 0
    for axis_group in axes:
        index += axis_group.axis.coordinate * num_holders
        num_holders *= axis_group.axis.size
    # A sum with zeros in place of a gather, for which these communicators have no memory yet.
    table = own.new_zeros(num_holders, len(units) + 1)
    table[index, :-1], table[index, -1] = own, dist.get_rank()
    run_steps(all_reduce_steps(table.view(-1), axes))
    *hashes, ranks = table.cpu().unbind(dim=1)
    return [
        f"{state} of {unit.name} {_who(column.tolist(), ranks.tolist())}"
        for unit, column in zip(units, hashes, strict=True)
        if (column != column[0]).any()
    ]


def _who(hashes: Sequence[int], ranks: Sequence[int]) -> str:
    (usual, count), *others = Counter(hashes).most_common()
    if count > max(number for _, number in others):
        odd = sorted(rank for rank, value in zip(ranks, hashes) if value != usual)
        alike = sorted(rank for rank, value in zip(ranks, hashes) if value == usual)
        return f"on {name_ranks(odd)} are unlike those on {name_ranks(alike)}"
    return f"are not the same on {name_ranks(sorted(ranks))}"
