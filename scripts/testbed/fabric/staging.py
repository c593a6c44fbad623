# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how tensors of any strides become the one-dimensional ones that travel, and back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in one dimension: its own memory if it is contiguous, else a copy.

    It goes through `.data`, so that autograd sees no access of another thread, as with an
    accelerator's.
    """
    return tensor.data.contiguous().view(-1)


@contextmanager
def staged(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """An output, flattened; written back at the end where that is not its own memory."""
    with staged_all([tensor]) as (flat,):
        yield flat


@contextmanager
def staged_all(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Several outputs, as `staged`."""
    flats = [flattened(tensor) for tensor in tensors]
    yield flats
    for tensor, flat in zip(tensors, flats):
        if not tensor.is_contiguous():
            tensor.data.copy_(flat.view(tensor.shape))


def copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors that may share memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def described(tensors: Sequence[torch.Tensor]) -> str:
    """Sizes and dtype in a few words: what must be equal on all ranks."""
    sizes = " + ".join(str(tensor.numel()) for tensor in tensors[:4])
    more = f" + {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return f"{sizes}{more} x {str(tensors[0].dtype).removeprefix('torch.')}"
