# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the collectives of the engine on flat tensors, one mesh axis at a time (law 2).
Must not know parameters or when it is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_asynchzp.sharding.topology import MeshAxis

# torch 2.13 renamed the flat collectives; 2.11 and 2.12 have only the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class AxisGroup:
    """A mesh axis and the process group along it, for one kind of operation."""

    axis: MeshAxis
    group: dist.ProcessGroup


def all_gather_axes(shard: torch.Tensor, full: torch.Tensor, axes: Sequence[AxisGroup]) -> None:
    """Gather `shard` over `axes` (innermost first, as the topology lists them) into `full`.

    shard: 1-D, n elements; full: 1-D, n x product of the axis sizes, same dtype. The outermost
    axis is gathered first: over the slowest link travels the least, and every intermediate
    result is a contiguous part of `full`, so no memory is needed beside it. `shard` may already
    lie at its place in `full`.
    """
    if not axes:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return
    inner, outer = axes[0], axes[1:]
    length = full.numel() // inner.axis.size
    own = full[inner.axis.coordinate * length :][:length]
    all_gather_axes(shard, own, outer)
    _all_gather_flat(full, own, group=inner.group)


def reduce_scatter_axes(full: torch.Tensor, axes: Sequence[AxisGroup]) -> torch.Tensor:
    """Sum `full` over `axes` and return this rank's shard of the sum.

    full: 1-D, n x product of the axis sizes; the result is 1-D with n elements, in new memory
    (`full` itself where there is no axis). The innermost axis is reduced first: the slowest link
    carries the least.
    """
    for axis_group in axes:
        shard = full.new_empty(full.numel() // axis_group.axis.size)
        _reduce_scatter_flat(shard, full, group=axis_group.group)
        full = shard
    return full


def all_reduce_axes(shard: torch.Tensor, axes: Sequence[AxisGroup]) -> None:
    """Sum `shard` in place over `axes`."""
    for axis_group in axes:
        dist.all_reduce(shard, group=axis_group.group)
