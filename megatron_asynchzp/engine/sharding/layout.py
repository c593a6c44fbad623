# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The offsets of parameters in a unit's flat buffer, and the pieces and boxes cut out of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_asynchzp.engine.sharding.topology import Range

PARAM_ALIGNMENT_NUMEL = 64
"""Elements to which every parameter and shard is aligned (128 bytes in bf16), for GEMMs, vectorised
optimizers and NCCL."""
FP32_NBYTES = 4


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlice:
    """Name, shape and flat range of a parameter."""

    name: str
    shape: tuple[int, ...]
    range: Range


@dataclass(frozen=True)
class FlatLayout:
    """The parameters of a unit, in order, in a flat buffer that divides over `num_shards` ranks.

        | weight | pad | bias | pad | ... | padding to num_shards x alignment |

    It depends on names, shapes and `num_shards` alone. So ranks with the same parameters
    (tensor-parallel peers, both ends of a tied embedding) can reduce shards element by element.
    """

    slices: tuple[ParamSlice, ...]
    numel: int
    padded_numel: int

    @classmethod
    def build(cls, params: Iterable[tuple[str, tuple[int, ...]]], num_shards: int) -> "FlatLayout":
        """Lay out pairs (name, shape); raise ValueError for a repeated name."""
        slices: list[ParamSlice] = []
        offset = numel = 0
        for name, shape in params:
            count = prod(shape)
            slices.append(ParamSlice(name, tuple(shape), Range(offset, offset + count)))
            offset = round_up(offset + count, PARAM_ALIGNMENT_NUMEL)
            numel += count
        names = [s.name for s in slices]
        if len(set(names)) != len(names):
            raise ValueError(f"a parameter is named twice in {names}")
        padded = round_up(max(offset, 1), num_shards * PARAM_ALIGNMENT_NUMEL)
        return cls(tuple(slices), numel, padded)

    def fragments(self, shard: Range) -> list[Range]:
        """Return the part of each parameter in `shard`, in flat coordinates; some may be empty."""
        return [piece.range.intersect(shard) for piece in self.slices]


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


@dataclass(frozen=True)
class Box:
    """A rectangular part of a row-major tensor whose elements are contiguous."""

    offset: tuple[int, ...]  # elements, one number per dim
    shape: tuple[int, ...]
    range: Range  # its flat elements


def cut_into_boxes(shape: Sequence[int], part: Range) -> list[Box]:
    """Cut the flat elements `part` of a row-major tensor into the fewest boxes, in order.

    shape (4, 6)          . . . . a a       at most 2 x dims - 1 boxes: the rest of a row,
    part  [4, 20)         b b b b b b       whole rows, the beginning of a row
                          b b b b b b
                          c c . . . .
    """
    return list(_boxes(tuple(shape), part.start, part.stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int, base: int = 0) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), (), Range(base, base + 1))
        return
    row_numel = prod(shape[1:])
    first, last = -(-start // row_numel), stop // row_numel  # whole rows: [first, last)
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop, base)
        return
    yield from _in_row(shape, first - 1, start, first * row_numel, base)
    if first < last:
        range_ = Range(base + first * row_numel, base + last * row_numel)
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), range_)
    yield from _in_row(shape, last, last * row_numel, stop, base)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int, base: int) -> Iterator[Box]:
    offset = row * prod(shape[1:])
    for box in _boxes(shape[1:], start - offset, stop - offset, base + offset):
        yield Box((row, *box.offset), (1, *box.shape), box.range)
