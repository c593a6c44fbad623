# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the algorithms of the collectives: where each piece goes, and the order of reduction.

Volumes are the least possible ones. For n ranks and tensors of S bytes, sent in all / per rank:

    all-gather, reduce-scatter   (n-1) S     (n-1)/n S      S: the full tensor
    all-reduce                 2 (n-1) S   2 (n-1)/n S
    broadcast, reduce            (n-1) S     S, and nothing by the last of the chain
    all-to-all                   what is not for the rank itself

[Note: order of reduction] Chunk c of a ring starts at rank c + 1 and ends at rank c, its owner:
(((x[c+1] + x[c+2]) + ...) + x[c]), each sum rounded to the dtype. The order depends on the sizes
alone: equal run to run; an all-reduce is a reduce-scatter and an all-gather of the owners' chunks,
hence bitwise equal on all ranks, and to those two done one after the other. AVG divides the sum.
"""

from collections.abc import Sequence

import numpy
import torch

from scripts.testbed.fabric.network import Link
from scripts.testbed.fabric.reduction import Reduction

Chunks = Sequence[torch.Tensor] | torch.Tensor
"""One tensor for each rank of a group; a tensor in two dimensions stands for its rows."""


def ring_all_gather(link: Link, chunks: Chunks) -> None:
    """All ranks get all chunks; chunks[link.rank] is filled already."""
    n, r = link.size, link.rank
    for step in range(n - 1):
        link.exchange(chunks[(r - step) % n], (r + 1) % n, chunks[(r - step - 1) % n], (r - 1) % n)


def ring_reduce_scatter(link: Link, chunks: Chunks, own: torch.Tensor, how: Reduction) -> None:
    """Set own to the reduction over the ranks of their chunks[link.rank]; it may be that chunk."""
    n, r = link.size, link.rank
    if n == 1:
        own.copy_(chunks[0])
        return
    longest = max(chunk.numel() for chunk in chunks)
    received, partial = _scratch(longest, own.dtype), _scratch(longest, own.dtype)
    for step in range(n - 1):
        leaving, arriving = chunks[(r - step - 1) % n], chunks[(r - step - 2) % n]
        message = leaving if step == 0 else partial[: leaving.numel()]
        incoming = received[: arriving.numel()]
        link.exchange(message, (r + 1) % n, incoming, (r - 1) % n)
        is_last = step == n - 2
        how.combine(incoming, arriving, out=own if is_last else partial[: arriving.numel()])
    how.finish(own, n)


def ring_all_reduce(link: Link, flat: torch.Tensor, how: Reduction) -> None:
    """In place. Chunks differ by one element at the most where n does not divide the length."""
    chunks = flat.tensor_split(link.size)
    ring_reduce_scatter(link, chunks, chunks[link.rank], how)
    ring_all_gather(link, chunks)


def chain_broadcast(link: Link, flat: torch.Tensor, root: int) -> None:
    """Send along root -> root + 1 -> ..., in pieces that follow each other."""
    place = (link.rank - root) % link.size
    before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
    has_after = place < link.size - 1
    pieces = _pieces(flat)
    for piece, earlier in zip([*pieces, None], [None, *pieces]):
        # One piece arrives while the one before it leaves.
        receive = piece if place > 0 else None
        send = (earlier if place > 0 else piece) if has_after else None
        if receive is not None or send is not None:
            link.exchange(send, after, receive, before)


def chain_reduce(link: Link, flat: torch.Tensor, root: int, how: Reduction) -> None:
    """Reduce along root + 1 -> root + 2 -> ... -> root."""
    place = (link.rank - root - 1) % link.size
    before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
    for piece in _pieces(flat):
        partial = piece
        if place > 0:
            received = _scratch(piece.numel(), piece.dtype)
            link.exchange(receive=received, source=before)
            partial = piece if link.rank == root else received
            how.combine(received, piece, out=partial)
        if link.rank != root:
            link.exchange(partial, after)
    if link.rank == root:
        how.finish(flat, link.size)


def gather_to(link: Link, own: torch.Tensor, outputs: Chunks, root: int) -> None:
    """Set outputs, of root alone, to the ranks' own, in rank order."""
    if link.rank != root:
        link.exchange(own, root)
        return
    for source, output in enumerate(outputs):
        if source == root:
            output.copy_(own)
        else:
            link.exchange(receive=output, source=source)


def scatter_from(link: Link, own: torch.Tensor, inputs: Chunks, root: int) -> None:
    """Set own to piece link.rank of root's inputs."""
    if link.rank != root:
        link.exchange(receive=own, source=root)
        return
    for target, piece in enumerate(inputs):
        if target == root:
            own.copy_(piece)
        else:
            link.exchange(piece, target)


def pairwise_all_to_all(link: Link, outputs: Chunks, inputs: Chunks) -> None:
    """outputs[i] = what rank i has for this rank; sizes may differ from pair to pair."""
    n, r = link.size, link.rank
    outputs[r].copy_(inputs[r])
    for step in range(1, n):
        to, source = (r + step) % n, (r - step) % n
        link.exchange(inputs[to], to, outputs[source], source)


def dissemination_barrier(link: Link) -> None:
    """No rank returns before every rank has begun; carries no payload."""
    nothing, distance = torch.empty(0, dtype=torch.uint8), 1
    while distance < link.size:
        to, source = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        link.exchange(nothing, to, nothing, source)
        distance *= 2


def _pieces(flat: torch.Tensor, most: int = 8, least_numel: int = 16384) -> list[torch.Tensor]:
    """Consecutive parts: enough to keep a chain busy, none too small to be worth a message."""
    return list(flat.tensor_split(max(1, min(most, flat.numel() // least_numel))))


def _scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the network, not of the program: outside torch's allocator, so not counted."""
    memory = numpy.empty(max(1, numel) * dtype.itemsize, numpy.uint8)
    return torch.from_numpy(memory).view(dtype)[:numel]
