# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on the modelled network: the default group of run_ranks, made anew."""

import torch.distributed as dist

from scripts.testbed import fabric
from scripts.testbed.fabric.network import Network
from scripts.testbed.profile import NetworkProfile


def replace_default_group(profile: NetworkProfile = NetworkProfile()) -> Network:
    """Make the fabric the default group of this rank's world. Collective."""
    store = dist.PrefixStore("fabric", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    network = fabric.register(profile)
    dist.init_process_group("fabric", store=store, rank=rank, world_size=world_size)
    return network
