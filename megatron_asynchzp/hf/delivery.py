# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sends tensors from rank to rank, outside of any sharding group."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Parcel(NamedTuple):
    """A tensor on its way from a rank to another."""

    source: int
    receiver: int
    tensor: torch.Tensor  # contiguous: the values on `source`, the memory for them on `receiver`


def deliver(parcels: Sequence[Parcel]) -> None:
    """Send and receive the parcels of this rank, and wait until their tensors may be used.

    Parcels between the same two ranks must come in the same order on both.
    """
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
