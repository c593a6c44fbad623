# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of gradients that are reduced piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_asynchzp.engine.sharding.layout import (
    FP32_NBYTES,
    PARAM_ALIGNMENT_NUMEL,
    FlatLayout,
    round_up,
)
from megatron_asynchzp.engine.sharding.topology import Range


@dataclass(frozen=True)
class ParamCopy:
    """The part of a parameter's gradient in a piece."""

    index: int  # of the parameter in the unit
    source: Range | None  # elements of the flattened parameter, None for all of them
    target: Range  # elements of the piece


@dataclass(frozen=True)
class GradPiece:
    """The elements `part` of every shard, one shard after the other.

        shards of the flat layout    | a0 a1 a2 | b0 b1 b2 | c0 c1 c2 |
        pieces                       | a0 b0 c0 |  | a1 b1 c1 |  | a2 b2 c2 |

    A reduce-scatter of a piece leaves a contiguous part of its shard to each rank.
    """

    part: Range  # in coordinates of a shard
    numel: int  # over all shards
    copies: tuple[ParamCopy, ...]
    gaps: tuple[Range, ...]  # padding between the copies; no range is empty


def piece_length(padded_numel: int, num_shards: int, slot_nbytes: int) -> int:
    """Return the elements of each shard in a piece of at most `slot_nbytes` in fp32.

    It is at least one alignment. Pieces are of equal size, except for a smaller last one.
    """
    shard = padded_numel // num_shards
    most = slot_nbytes // FP32_NBYTES // num_shards // PARAM_ALIGNMENT_NUMEL * PARAM_ALIGNMENT_NUMEL
    num_pieces = -(-shard // max(most, PARAM_ALIGNMENT_NUMEL))
    return round_up(-(-shard // num_pieces), PARAM_ALIGNMENT_NUMEL)


def grad_pieces(layout: FlatLayout, num_shards: int, slot_nbytes: int) -> list[GradPiece]:
    shard = layout.padded_numel // num_shards
    length = piece_length(layout.padded_numel, num_shards, slot_nbytes)
    parts = [Range(start, min(start + length, shard)) for start in range(0, shard, length)]
    return [_piece(layout, num_shards, part) for part in parts]


def _piece(layout: FlatLayout, num_shards: int, part: Range) -> GradPiece:
    shard = layout.padded_numel // num_shards
    copies: list[ParamCopy] = []
    if part.numel == shard:  # one piece holds everything, in the order of the layout
        copies = [ParamCopy(i, None, piece.range) for i, piece in enumerate(layout.slices)]
    else:
        for number in range(num_shards):
            source = Range(number * shard + part.start, number * shard + part.stop)
            offset = number * part.numel - source.start
            for index, piece in enumerate(layout.slices):
                common = piece.range.intersect(source)
                if common.numel:
                    target = Range(common.start + offset, common.stop + offset)
                    copies.append(ParamCopy(index, common.within(piece.range), target))
    numel = part.numel * num_shards
    return GradPiece(part, numel, tuple(copies), _gaps([c.target for c in copies], numel))


def _gaps(taken: Sequence[Range], numel: int) -> tuple[Range, ...]:
    edges = [0, *(edge for range_ in taken for edge in range_), numel]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(Range(start, stop) for start, stop in pairs if stop > start)
