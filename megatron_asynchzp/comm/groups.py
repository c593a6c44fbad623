# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the process groups of one sharding topology, one per axis and kind of operation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import AxisGroup, all_gather_flat, reduce_scatter_flat
from megatron_asynchzp.sharding.topology import MeshAxis, ShardTopology

_REAL_NBYTES = 1 << 24


@dataclass(frozen=True)
class ShardGroups:
    """The axes of a topology with their communicators, innermost axis first.

    Gathering and reducing have communicators of their own, because operations of one
    communicator are serialised.

    ranks: the global rank of each rank of the sharding group, in its order.
    grad_dtype: in which gradients travel; they are summed in fp32.
    """

    topology: ShardTopology
    unshard: tuple[AxisGroup, ...]
    grad_reduce: tuple[AxisGroup, ...]
    grad_sync: tuple[AxisGroup, ...]
    replica_sync: tuple[AxisGroup, ...]
    param_sync: tuple[AxisGroup, ...]
    ranks: tuple[int, ...]
    grad_dtype: torch.dtype = torch.float32

    @property
    def all_reduce_axes(self) -> tuple[AxisGroup, ...]:
        """All axes, with the communicators for reducing: together they span the sharding group."""
        return (*self.grad_reduce, *self.grad_sync, *self.replica_sync)

    @property
    def optim_gather_axes(self) -> tuple[AxisGroup, ...]:
        """The axes between one part of the optimizer state and the whole, for gathering."""
        return (*self.unshard, *self.param_sync)

    @property
    def num_axes_in_step(self) -> int:
        """How many of all_reduce_axes connect ranks that gather or reduce together, and so have
        equally many micro-batches."""
        sizes = self.topology.sizes
        return len(self.reduce_axes_within(max(sizes.param, sizes.grad)))

    def reduce_axes_within(self, size: int) -> list[AxisGroup]:
        """Those of all_reduce_axes that lie within a group of `size` ranks."""
        return [one for one in self.all_reduce_axes if one.axis.stride * one.axis.size <= size]

    @property
    def all_groups(self) -> set[dist.ProcessGroup]:
        """Every communicator."""
        axes = (*self.optim_gather_axes, *self.all_reduce_axes)
        return {axis.group for axis in axes}

    def connect(self, device: torch.device) -> None:
        """Use every communicator once for each of its operations. Collective over the sharding
        group.

        NCCL makes a communicator in its first collective, and connects and takes memory in the
        first of a kind and of a size: now, rather than in the middle of the first step.
        """
        gathers = dict.fromkeys(axis.group for axis in self.optim_gather_axes)
        reductions = dict.fromkeys(axis.group for axis in self.all_reduce_axes)
        for group in gathers:  # in one order on all ranks
            whole, part = _of_real_size(group, device)
            all_gather_flat(whole, part, group=group)
        for group in reductions:
            whole, part = _of_real_size(group, device)
            reduce_scatter_flat(part, whole, group=group)
            dist.all_reduce(part, group=group)  # pyright: ignore[reportUnknownMemberType]
            if self.grad_dtype != torch.float32:
                dist.all_to_all_single(torch.empty_like(whole), whole, group=group)  # pyright: ignore[reportUnknownMemberType]

    @classmethod
    def create(
        cls,
        topology: ShardTopology,
        global_ranks: Sequence[int],
        timeout: timedelta | None = None,
        grad_dtype: torch.dtype = torch.float32,
        new_options: Callable[[], Any] = lambda: None,
    ) -> "ShardGroups":
        """Create the groups of all ranks. Collective over the world.

        global_ranks: global rank of each rank of the sharding group, in its order; the sharding
            groups of other ranks have the same size. Every rank creates every group, in one order,
            so that creation cannot deadlock and names never collide.
        new_options: makes what torch takes as `pg_options`, once for each group.
        """
        everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(everyone, tuple(global_ranks))  # pyright: ignore[reportUnknownMemberType]
        created: dict[tuple[str, tuple[int, ...]], Any] = {}
        for purpose in ("gather", "reduce"):
            for ranks in _axis_groups(topology, sorted(set(everyone))):
                created[purpose, ranks] = dist.new_group(  # pyright: ignore[reportUnknownMemberType]
                    list(ranks),
                    timeout=timeout,
                    pg_options=new_options(),
                    group_desc=f"ASYNCHZP_{purpose.upper()}",
                )

        return cls.of_topology(
            topology, global_ranks, lambda purpose, ranks: created[purpose, ranks], grad_dtype
        )

    @classmethod
    def of_topology(
        cls,
        topology: ShardTopology,
        global_ranks: Sequence[int],
        group_of: Callable[[str, tuple[int, ...]], dist.ProcessGroup],
        grad_dtype: torch.dtype = torch.float32,
    ) -> "ShardGroups":
        """global_ranks: see `create`.
        group_of: the communicator over the global ranks of an axis, for the purpose "gather" or
            "reduce".
        """

        def along(purpose: str, axes: Sequence[MeshAxis]) -> tuple[AxisGroup, ...]:
            all_ranks = [tuple(global_ranks[member] for member in axis.members) for axis in axes]
            return tuple(
                AxisGroup(axis, group_of(purpose, ranks), ranks)
                for axis, ranks in zip(axes, all_ranks, strict=True)
            )

        return cls(
            topology,
            unshard=along("gather", topology.param_axes),
            param_sync=along("gather", topology.param_sync_axes),
            grad_reduce=along("reduce", topology.grad_axes),
            grad_sync=along("reduce", topology.grad_sync_axes),
            replica_sync=along("reduce", topology.replica_axes),
            ranks=tuple(global_ranks),
            grad_dtype=grad_dtype,
        )


def _of_real_size(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ranks of a group have together, and the part of one: enough that NCCL takes none of
    its protocols for short messages."""
    numel = _REAL_NBYTES // 4 // group.size()
    whole = torch.zeros(numel * group.size(), device=device)
    return whole, torch.zeros(numel, device=device)


def _axis_groups(
    topology: ShardTopology, sharding_groups: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Global ranks along every axis of every sharding group, each once, in one order."""
    groups: dict[tuple[int, ...], None] = {}
    for global_ranks in sharding_groups:
        for rank in range(topology.world_size):
            for axis in replace(topology, rank=rank).axes:
                groups[tuple(global_ranks[member] for member in axis.members)] = None
    return list(groups)
