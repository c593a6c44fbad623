# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the arithmetic of gradients that are reduced piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_asynchzp.sharding.layout import (
    FP32_NBYTES,
    PARAM_ALIGNMENT_NUMEL,
    FlatLayout,
    round_up,
)
from megatron_asynchzp.sharding.topology import Range


@dataclass(frozen=True)
class Copy:
    """The part of one parameter that a piece holds.

    index: of the parameter.
    source: elements of the flattened parameter, None for all of them.
    target: where they are in the piece.
    """

    index: int
    source: Range | None
    target: Range


@dataclass(frozen=True)
class GradPiece:
    """The elements `part` of every shard, one after the other: what a reduce-scatter of the piece
    leaves to a rank is a contiguous part of its shard.

        shards of the flat layout    | a0 a1 a2 | b0 b1 b2 | c0 c1 c2 |
        pieces                       | a0 b0 c0 |  | a1 b1 c1 |  | a2 b2 c2 |

    part: in coordinates of a shard.
    numel: over all shards.
    copies: what it holds of parameters.
    gaps: what of it belongs to none, half-open, not empty.
    """

    part: Range
    numel: int
    copies: tuple[Copy, ...]
    gaps: tuple[Range, ...]


def piece_length(padded_numel: int, num_shards: int, slot_nbytes: int) -> int:
    """Elements of each shard in a piece of gradients that takes at most `slot_nbytes` in fp32, and
    at least one alignment per shard. Pieces are of equal size, but for the last one."""
    shard = padded_numel // num_shards
    most = slot_nbytes // FP32_NBYTES // num_shards // PARAM_ALIGNMENT_NUMEL * PARAM_ALIGNMENT_NUMEL
    num_pieces = -(-shard // max(most, PARAM_ALIGNMENT_NUMEL))
    return round_up(-(-shard // num_pieces), PARAM_ALIGNMENT_NUMEL)


def grad_pieces(layout: FlatLayout, num_shards: int, slot_nbytes: int) -> list[GradPiece]:
    """Cut the gradients of `layout`, which are reduced over `num_shards` ranks."""
    shard = layout.padded_numel // num_shards
    length = piece_length(layout.padded_numel, num_shards, slot_nbytes)
    parts = [Range(start, min(start + length, shard)) for start in range(0, shard, length)]
    return [_piece(layout, num_shards, part) for part in parts]


def _piece(layout: FlatLayout, num_shards: int, part: Range) -> GradPiece:
    shard = layout.padded_numel // num_shards
    copies: list[Copy] = []
    if part.numel == shard:  # all of it, in the order of the layout
        copies = [Copy(i, None, piece.range) for i, piece in enumerate(layout.slices)]
    else:
        for number in range(num_shards):
            here = Range(number * shard + part.start, number * shard + part.stop)
            offset = number * part.numel - here.start
            for index, piece in enumerate(layout.slices):
                held = piece.range.intersect(here)
                if held.numel:
                    target = Range(held.start + offset, held.stop + offset)
                    copies.append(Copy(index, held.within(piece.range), target))
    numel = part.numel * num_shards
    return GradPiece(part, numel, tuple(copies), _gaps([c.target for c in copies], numel))


def _gaps(taken: Sequence[Range], numel: int) -> tuple[Range, ...]:
    """Return the ranges of `numel` elements that are in none of `taken`, which are sorted."""
    edges = [0, *(edge for one in taken for edge in one), numel]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(Range(start, stop) for start, stop in pairs if stop > start)
