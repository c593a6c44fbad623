# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the process groups of one sharding topology, one per axis and kind of operation.
Must not know tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_asynchzp.comm.collectives import AxisGroup
from megatron_asynchzp.sharding.topology import MeshAxis, ShardTopology


@dataclass(frozen=True)
class ShardGroups:
    """The axes of a topology with their communicators, innermost axis first.

    Gathering and reducing have communicators of their own, because operations of one
    communicator are serialised.
    """

    topology: ShardTopology
    unshard: tuple[AxisGroup, ...]
    grad_reduce: tuple[AxisGroup, ...]
    grad_sync: tuple[AxisGroup, ...]
    replica_sync: tuple[AxisGroup, ...]
    param_sync: tuple[AxisGroup, ...]

    @classmethod
    def create(
        cls,
        topology: ShardTopology,
        global_ranks: Sequence[int],
        timeout: timedelta | None = None,
    ) -> "ShardGroups":
        """Create the groups of this rank. Collective over `global_ranks`.

        global_ranks: global rank of each rank of the sharding group, in its order. Every rank
        creates its groups in the same order (gathering axes, then reducing ones, inner before
        outer), so creation cannot deadlock.
        """
        created: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

        def along(purpose: str, axes: Sequence[MeshAxis]) -> tuple[AxisGroup, ...]:
            groups = []
            for axis in axes:
                ranks = tuple(global_ranks[member] for member in axis.members)
                if (purpose, ranks) not in created:
                    created[purpose, ranks] = dist.new_group(
                        list(ranks),
                        timeout=timeout,
                        use_local_synchronization=True,
                        group_desc=f"ASYNCHZP_{purpose.upper()}",
                    )
                groups.append(AxisGroup(axis, created[purpose, ranks]))
            return tuple(groups)

        return cls(
            topology,
            unshard=along("gather", topology.param_axes),
            param_sync=along("gather", topology.param_sync_axes),
            grad_reduce=along("reduce", topology.grad_axes),
            grad_sync=along("reduce", topology.grad_sync_axes),
            replica_sync=along("reduce", topology.replica_axes),
        )
