# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the communicators of Megatron's sharding groups, and broadcasts initial values over them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.units import sharding_group_key


def create_shard_groups(
    settings: RunSettings, pg_collection: ProcessGroupCollection, has_experts: bool
) -> dict[str, ShardGroups]:
    """Create the communicators of both sharding groups; has_experts is world-wide. Collective."""

    def over(name: str, group: dist.ProcessGroup, group_sizes: ShardSizes) -> ShardGroups:
        topology = ShardTopology(group.size(), group.rank(), group_sizes)
        options = partial(communicator_options, name, dist.get_backend(group), settings)
        created = ShardGroups.create(
            topology, group, settings.timeout, settings.grad_dtype, options
        )
        device = communication_device(group)
        if device.type != "cpu":
            created.connect(device)
        return replace(created, main_grad_dtype=settings.main_grad_dtype)

    groups = {"dense": over("dp_cp", pg_collection.dp_cp, settings.sizes)}
    if has_experts:
        expert_group = pg_collection.expt_dp
        expert_sizes = settings.sizes.restricted_to(expert_group.size())
        groups["expert"] = over("ep_dp", expert_group, expert_sizes)
    return groups


def communicator_options(name: str, backend: str, settings: RunSettings) -> Any:
    """Return NCCL's `pg_options` for a communicator of ours, None for other backends.

    name is Megatron's group that ours replace: its entry in --nccl-communicator-config-path
    (channels, network) holds for ours. Our stream has priority, unless that entry removes it: a
    collective that waits for the device holds up its peers.
    """
    if backend != "nccl":
        return None
    import yaml
    from megatron.core.parallel_state import get_nccl_options

    path = settings.communicator_file
    entry = (yaml.safe_load(Path(path).read_text()) or {}).get(name, {}) if path else {}
    options: Any = get_nccl_options(name, {name: {"is_high_priority_stream": True, **entry}})
    if settings.timeout is not None:
        options._timeout = settings.timeout  # torch warns where it is not that of the group
    return options


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors in collectives of `group`; a model may be built on another."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return accelerator


def broadcast_from_first_rank(
    param: torch.nn.Parameter, pg_collection: ProcessGroupCollection
) -> None:
    is_dense = sharding_group_key(param) == "dense"
    group = pg_collection.dp_cp if is_dense else pg_collection.expt_dp
    values = param.data.to(communication_device(group))
    dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
    if values.data_ptr() != param.data_ptr():
        param.data.copy_(values)
