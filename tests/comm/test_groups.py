# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's communicators: each rank makes its own, whatever groups and worlds there are."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm import groups as comm_groups
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.memory import resident_nbytes
from scripts.testbed.ranks import run_ranks

TWENTY_S = timedelta(seconds=20)


def groups_over(group, sizes: tuple[int, int, int]) -> ShardGroups:
    topology = ShardTopology(group.size(), group.rank(), ShardSizes(*sizes))
    return ShardGroups.create(topology, group, TWENTY_S)


def check_sums(groups: ShardGroups, device: torch.device) -> None:
    """Over each communicator the ranks along its axis are summed, and nobody else."""
    for axis in (*groups.optim_gather_axes, *groups.all_reduce_axes):
        ranks = torch.tensor([float(dist.get_rank())], device=device)
        dist.all_reduce(ranks, group=axis.group)
        assert ranks.item() == sum(axis.ranks)
        assert sum(1 for other in groups.all_groups if other is axis.group) == 1


def make_groups_of_many_kinds() -> None:
    cpu, rank, world = torch.device("cpu"), dist.get_rank(), dist.group.WORLD
    assert world is not None
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    # Rank 1 has a group of its own more, rank 3 two.
    for _ in range({1: 1, 3: 2}.get(rank, 0)):
        dist.new_group([rank], use_local_synchronization=True)
    check_sums(groups_over(world, (1, 2, 4)), cpu)
    # One half of the world shards two models, alone, the other one.
    for _ in range(2 if rank < 2 else 1):
        check_sums(groups_over(mine, (1, 1, 2)), cpu)
    # What was destroyed is made again, and the store still has the keys of the first.
    for _ in range(2):
        groups = groups_over(world, (4, 4, 4))
        check_sums(groups, cpu)
        for group in groups.all_groups:
            dist.destroy_process_group(group)
    check_sums(groups_over(world, (1, 1, 4)), cpu)


def test_ranks_make_their_groups_alone_whatever_others_they_have_and_had():
    run_ranks(make_groups_of_many_kinds, 4)


def cost_in_a_large_world(
    size: int, strides: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[float, float]:
    """CPU seconds and MB of one rank among `size` that are not there, for its sharding groups, each
    of every so many ranks (`strides`): the tensor-parallel size, and that of what shares out
    experts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=size // 2, world_size=size)
    shards = [dist.new_group(list(range(size // 2 % step, size, step))) for step in strides]
    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        setattr(dist, name, None)
    before, start = resident_nbytes(), time.process_time()
    for group in shards:
        found = ShardSizes(*sizes).restricted_to(group.size()).with_short_axes(8)
        topology = ShardTopology(group.size(), group.rank(), found)
        axes = ShardGroups.create(topology, group, TWENTY_S).all_groups
        assert len(axes) >= 4
    return time.process_time() - start, (resident_nbytes() - before) / 1e6


@pytest.mark.parametrize(
    ("size", "strides", "sizes"),
    [
        (16384, (1,), (8, 8, 16384)),
        (16384, (1, 64), (8, 64, 16384)),
        (16384, (1,), (16384, 16384, 16384)),
        (98304, (8, 32), (12288, 12288, 12288)),
    ],
)
def test_what_a_rank_pays_for_its_groups_does_not_grow_with_the_others(size, strides, sizes):
    [(cpu_s, mb)] = run_ranks(cost_in_a_large_world, 1, size, strides, sizes)
    assert cpu_s < 2 and mb < 100


def test_every_line_along_an_axis_comes_once_and_is_the_axis_of_its_members():
    world = [ShardTopology(24, rank, ShardSizes(2, 4, 12)) for rank in range(24)]
    for depth, axis in enumerate(world[0].axes):
        lines = list(world[0].lines(axis))
        assert sorted(rank for line in lines for rank in line) == list(range(24))
        assert all(world[rank].axes[depth].members == line for line in lines for rank in line)


def make_groups_without_torchs_names() -> str:
    comm_groups._TORCH_NAMES = "_names_that_torch_does_not_ask"
    try:
        assert dist.group.WORLD is not None
        groups_over(dist.group.WORLD, (1, 1, 1))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_torch_that_names_groups_in_another_way_is_refused():
    for line in run_ranks(make_groups_without_torchs_names, 2):
        assert torch.__version__ in line and "names process groups" in line
