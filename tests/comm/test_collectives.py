# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-axis collectives on real ranks: every nesting, against what one process computes."""

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import (
    all_gather_steps,
    all_reduce_steps,
    new_shards,
    reduce_scatter_steps,
    run_steps,
)
from scripts.testbed.ranks import run_ranks
from tests.support.engine import cut_sizes, nested_sizes, shard_groups
from tests.support.selection import slow_unless


def reduce_scatter(full: torch.Tensor, axes) -> torch.Tensor:
    shards = new_shards(full, axes)
    run_steps(reduce_scatter_steps(full, axes, shards))
    return shards[-1] if shards else full


def gather_and_reduce_everything(all_sizes: list[tuple[int, int, int]]) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checked = 0
    for sizes in all_sizes:
        groups = shard_groups(sizes)
        topology, numel = groups.topology, 6 * world_size
        values = torch.arange(float(numel))

        own = topology.shard_range(topology.sizes.param, numel)
        full = torch.full((numel,), float("nan"))
        run_steps(all_gather_steps(values[own.start : own.stop].clone(), full, groups.unshard))
        assert torch.equal(full, values), sizes

        scattered = reduce_scatter(values * (rank + 1), groups.grad_reduce)
        own = topology.shard_range(topology.sizes.grad, numel)
        first = topology.rank - topology.rank % topology.sizes.grad
        peers = sum(r + 1 for r in range(first, first + topology.sizes.grad))
        assert torch.equal(scattered, values[own.start : own.stop] * peers), sizes

        summed = reduce_scatter(scattered, groups.grad_sync)
        run_steps(all_reduce_steps(summed, groups.replica_sync))
        own = topology.shard_range(topology.sizes.optim, numel)
        total = world_size * (world_size + 1) // 2
        assert torch.equal(summed, values[own.start : own.stop] * total), sizes
        checked += 1
    return checked


@pytest.mark.parametrize(
    ("world_size", "chains"),
    [
        slow_unless(True, 6, nested_sizes(6) + cut_sizes(6)),
        slow_unless(True, 8, [(2, 4, 8), (4, 2, 8), (1, 1, 8, (2, 4))]),  # three axes
        slow_unless(False, 4, nested_sizes(4) + cut_sizes(4)),
        slow_unless(False, 8, nested_sizes(8) + cut_sizes(8)),
    ],
)
def test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner(
    world_size, chains
):
    checked = run_ranks(gather_and_reduce_everything, world_size, chains)
    assert checked == [len(chains)] * world_size
