# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the way of tensors from one rank to another, outside of any sharding group."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Parcel(NamedTuple):
    """tensor: contiguous; what the rank `source` sends, or where the rank `receiver` takes it."""

    source: int
    receiver: int
    tensor: torch.Tensor


def deliver(parcels: Sequence[Parcel]) -> None:
    """Send and receive all `parcels` of this rank, in any order of ranks; those between the same
    two ranks come in the same order on both. Returns when the tensors may be used and freed."""
    rank = dist.get_rank()
    operations = [
        dist.P2POp(dist.isend, parcel.tensor, parcel.receiver)
        if parcel.source == rank
        else dist.P2POp(dist.irecv, parcel.tensor, parcel.source)
        for parcel in parcels
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
