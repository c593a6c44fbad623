# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The process groups of a sharding topology, one per axis and kind of operation."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    all_gather_flat,
    reduce_scatter_flat,
)
from megatron_asynchzp.engine.sharding.topology import MeshAxis, ShardTopology
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.versions import TORCH

_REAL_NBYTES = 1 << 24
_TORCH_NAMES = "_hash_ranks_to_str"  # torch's function that names locally created groups


# Compared by identity: in a simulation without communicators all fields may be equal.
@dataclass(frozen=True, eq=False)
class ShardGroups:
    """The axes of a topology with their communicators, innermost axis first.

    Gathers and reductions have separate communicators, since a communicator serialises its
    operations.
    """

    topology: ShardTopology
    unshard: tuple[AxisGroup, ...]
    grad_reduce: tuple[AxisGroup, ...]
    grad_sync: tuple[AxisGroup, ...]
    replica_sync: tuple[AxisGroup, ...]
    param_sync: tuple[AxisGroup, ...]
    ranks: tuple[int, ...]  # global ranks of the sharding group, in its order
    grad_dtype: torch.dtype = torch.float32  # on the wire; sums are fp32
    main_grad_dtype: torch.dtype = torch.float32  # of the sums of micro-batches

    @property
    def all_reduce_axes(self) -> tuple[AxisGroup, ...]:
        """All axes, with the communicators for reductions; they span the sharding group."""
        return (*self.grad_reduce, *self.grad_sync, *self.replica_sync)

    @property
    def optim_gather_axes(self) -> tuple[AxisGroup, ...]:
        return (*self.unshard, *self.param_sync)

    @property
    def num_axes_in_step(self) -> int:
        """The number of all_reduce_axes whose ranks communicate in each micro-batch."""
        sizes = self.topology.sizes
        return len(self.reduce_axes_within(max(sizes.param, sizes.grad)))

    def reduce_axes_within(self, size: int) -> list[AxisGroup]:
        ends = [(line, line.axis.stride * line.axis.size) for line in self.all_reduce_axes]
        return [line for line, end in ends if end <= size]

    @property
    def all_groups(self) -> set[dist.ProcessGroup]:
        axes = (*self.optim_gather_axes, *self.all_reduce_axes)
        return {axis.group for axis in axes}

    def connect(self, device: torch.device) -> None:
        """Run each operation of every communicator once. Collective over the sharding group.

        NCCL creates a communicator in its first collective, and connects and allocates in the first
        of each kind and size. That is to happen now, not in the middle of the first step.
        """
        gathers = dict.fromkeys(axis.group for axis in self.optim_gather_axes)
        reductions = dict.fromkeys(axis.group for axis in self.all_reduce_axes)
        for group in gathers:  # in one order on all ranks
            whole, part = _of_real_size(group, device)
            all_gather_flat(whole, part, group=group)
        for group in reductions:
            whole, part = _of_real_size(group, device)
            reduce_scatter_flat(part, whole, group=group)
            dist.all_reduce(whole, group=group)  # pyright: ignore[reportUnknownMemberType]
            if self.grad_dtype != torch.float32:
                dist.all_to_all_single(torch.empty_like(whole), whole, group=group)  # pyright: ignore[reportUnknownMemberType]

    @classmethod
    def create(
        cls,
        topology: ShardTopology,
        sharding_group: dist.ProcessGroup,
        timeout: timedelta | None = None,
        grad_dtype: torch.dtype = torch.float32,
        new_options: Callable[[], Any] = lambda: None,
    ) -> "ShardGroups":
        """Create this rank's groups. Collective over `sharding_group` alone.

        Each rank computes the members and creates its groups in the order of the axes, so creation
        cannot deadlock. `new_options` returns torch's `pg_options` of a group.

        Raises:
            ConfigurationError: this torch names groups in an unknown way.
        """
        global_ranks = dist.get_process_group_ranks(sharding_group)
        number = _created.get(sharding_group, 0)
        _created[sharding_group] = number + 1
        prefix = f"asynchzp-{sharding_group.group_name}-{number}"
        axes = {tuple(global_ranks[m] for m in axis.members): axis for axis in topology.axes}
        splits = _splits(sharding_group)

        def new_group(purpose: str, ranks: tuple[int, ...]) -> Any:
            axis = axes[ranks]
            options: dict[str, Any] = {
                "timeout": timeout,
                "pg_options": new_options(),
                "group_desc": f"ASYNCHZP_{purpose.upper()}",
            }
            with _named(f"{prefix}-{purpose}-{axis.stride}-{axis.members[0]}"):
                if splits:
                    lines = [list(line) for line in topology.lines(axis)]
                    return dist.split_group(sharding_group, lines, **options)  # pyright: ignore[reportUnknownMemberType]
                return dist.new_group(list(ranks), use_local_synchronization=True, **options)  # pyright: ignore[reportUnknownMemberType]

        return cls.of_topology(topology, global_ranks, new_group, grad_dtype)

    @classmethod
    def of_topology(
        cls,
        topology: ShardTopology,
        global_ranks: Sequence[int],
        group_of: Callable[[str, tuple[int, ...]], dist.ProcessGroup],
        grad_dtype: torch.dtype = torch.float32,
    ) -> "ShardGroups":
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
    """Return 1-D fp32 zeros for a group and for one rank, too long for NCCL's short protocols."""
    numel = _REAL_NBYTES // 4 // group.size()
    whole = torch.zeros(numel * group.size(), device=device)
    return whole, torch.zeros(numel, device=device)


# The number of calls of `create` for each sharding group, equal on all its ranks.
_created: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


def _splits(group: dist.ProcessGroup) -> bool:
    """Return whether to split the communicator of `group`.

    If the default group is bound to a device, torch's new_group would split the default group's,
    which is collective over the whole world.
    """
    default: Any = dist.group.WORLD
    device = default.bound_device_id
    return device is not None and group._get_backend(device).supports_splitting  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _named(name: str) -> Generator[None]:
    """Make torch name the next group `name`, the same on all its ranks.

    torch's own name for a group that only its ranks create depends on the number of groups of a
    rank, which differs between ranks, and it is reused after a group was destroyed. Ranks would
    wait for each other under different keys of the store, or read the keys of the former group.
    """
    names, torch_names = [name], getattr(dist.distributed_c10d, _TORCH_NAMES, None)

    def name_of(ranks: list[int]) -> str:
        return names.pop()

    setattr(dist.distributed_c10d, _TORCH_NAMES, name_of)
    try:
        yield
    finally:
        setattr(dist.distributed_c10d, _TORCH_NAMES, torch_names)
    if names:
        raise ConfigurationError(
            f"torch {torch.__version__} names process groups in an unknown way. Install a tested "
            f"version: {', '.join(TORCH)}."
        )
