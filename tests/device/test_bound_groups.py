# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's communicators where the default group is bound to a device: torch then splits."""

import torch
import torch.distributed as dist

from scripts.testbed.device.worlds import DeviceWorlds
from tests.comm.test_groups import check_sums, groups_over
from tests.device.programs import device_of_rank


def make_groups_of_a_bound_world() -> list[int]:
    """The numbers of splits of the world's communicator and of the sharding group's."""
    world, device = dist.group.WORLD, device_of_rank()
    assert world is not None
    world.bound_device_id = device
    dist.all_reduce(torch.ones(1, device=device))
    check_sums(groups_over(world, (1, 2, 4)), device)
    # A rank of the world that does not come is not waited for.
    half = [dist.split_group(split_ranks=[[0, 1], [2, 3]])][0]
    if dist.get_rank() < 2:
        check_sums(groups_over(half, (2, 1, 2)), device)
    return [group._get_backend(device).comm_split_count() for group in (world, half)]


def test_groups_of_a_world_that_is_bound_to_a_device_split_their_own_sharding_group(
    worlds: DeviceWorlds,
):
    for rank, (of_world, of_half) in enumerate(worlds.run(make_groups_of_a_bound_world, 4)):
        assert (of_world, of_half) == (4 + 1, 2 if rank < 2 else 0)
