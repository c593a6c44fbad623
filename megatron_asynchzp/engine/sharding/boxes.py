# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a run of a tensor's elements into boxes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_asynchzp.engine.sharding.topology import Range


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
