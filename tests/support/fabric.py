# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on the modelled network: the default group of run_ranks, made anew."""

from collections.abc import Callable

import torch.distributed as dist

from scripts.testbed import fabric
from scripts.testbed.fabric.network import Network
from scripts.testbed.profile import NetworkProfile
from tests.support import engine


def replace_default_group(
    profile: NetworkProfile = NetworkProfile(),
    register: Callable[[NetworkProfile], Network] = fabric.register,
) -> Network:
    """Make the fabric the default group of this rank's world. Collective."""
    store = dist.PrefixStore("fabric", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    network = register(profile)
    dist.init_process_group(fabric.BACKEND, store=store, rank=rank, world_size=world_size)
    engine.shard_groups.cache_clear()  # groups of the default group that was
    return network
