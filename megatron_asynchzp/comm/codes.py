# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the form in which weights travel to layers that compute with them in FP8: a byte each, on
the grid of those layers, so that nothing is lost.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from math import prod

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_asynchzp.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    completed,
    followed_by,
)
from megatron_asynchzp.sharding.layout import PARAM_ALIGNMENT_NUMEL, FlatLayout, round_up
from megatron_asynchzp.sharding.topology import Range

CODE = torch.float8_e4m3fn
_TOP = torch.finfo(CODE).max
_FP32_MAX = torch.finfo(torch.float32).max
_MOST_AT_ONCE = 2**20  # elements that are fp32 for a moment


@dataclass(frozen=True)
class WeightGrid:
    """One scale for each weight, from its largest magnitude (Transformer Engine's
    Float8CurrentScaling), or for each of its blocks (Float8BlockScaling's 2-D weights).

    is_power: whether scales are powers of two.
    epsilon: what the largest magnitude counts as at least.
    side: rows and columns of a block; None: the weight is one.
    """

    is_power: bool = False
    epsilon: float = 0.0
    side: int | None = None

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the factor of each block, by its largest magnitude `amax` (fp32), as the layers
        have it (recipe_common.cuh, compute_scale_from_amax) where they are finite and not all zero.
        An infinite one gives 0, and its block becomes 0 / 0."""
        raised = amax.clamp_min(self.epsilon)
        scale = (torch.full_like(raised, _TOP) / raised).clamp_max(_FP32_MAX)
        if self.is_power:  # the mantissa's bits are cleared
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        return scale

    def num_blocks(self, shape: Sequence[int]) -> int:
        return prod(-(-size // self.side) for size in shape) if self.side else 1


@dataclass(frozen=True)
class _Part:
    """The part of a coded weight that a rank holds.

    shape: of the weight, two-dimensional where blocks have a side; blocks: their numbers among all
    of the unit; first: the number in the weight of the first element; place: the part in the shard.
    """

    grid: WeightGrid
    shape: tuple[int, ...]
    blocks: slice
    first: int
    place: slice

    def pieces(self) -> list[slice]:
        """None is of more than _MOST_AT_ONCE elements or a row of blocks, and each row of blocks
        lies in one."""
        start, stop, most = self.place.start, self.place.stop, _MOST_AT_ONCE
        if self.grid.side:
            band = self.grid.side * self.shape[1]
            most = max(most // band, 1) * band
        ends = [start, *range(start - self.first % most + most, stop, most), stop]
        return list(starmap(slice, pairwise(ends)))

    def raise_to(self, amax: torch.Tensor, piece: slice, values: torch.Tensor) -> None:
        """Raise the blocks' `amax` (fp32) to the magnitudes of `values`, those of a piece."""
        own = amax[self.blocks]
        if self.grid.side is None:
            own.copy_(torch.maximum(own, _infinite_for_nan(values.abs().amax())))
            return
        side, (bands, before, numel, columns) = self.grid.side, self._bands(piece)
        wide = round_up(columns, side)
        padded = values.new_zeros((bands.stop - bands.start) * side * columns)
        padded[before : before + numel].copy_(values)
        blocks = pad(padded.view(-1, columns), (0, wide - columns)).view(
            -1, side, wide // side, side
        )
        own.view(-1, wide // side)[bands] = _infinite_for_nan(blocks.abs().amax((1, 3)))

    def spread(self, of_blocks: torch.Tensor, piece: slice) -> torch.Tensor:
        """The number of each element's block, of a piece; one where that is one block."""
        own = of_blocks[self.blocks]
        if self.grid.side is None:  # of one dimension: torch would round one of none to bf16
            return own
        side, (bands, before, numel, columns) = self.grid.side, self._bands(piece)
        rows = own.view(-1, -(-columns // side))[bands].repeat_interleave(side, 1)[:, :columns]
        return rows.repeat_interleave(side, 0).reshape(-1)[before : before + numel]

    def _bands(self, piece: slice) -> tuple[slice, int, int, int]:
        """The rows of blocks that a piece lies in; its elements before it there, and its own; and
        the columns of the weight."""
        side, columns = self.grid.side or 1, self.shape[1]
        first, numel = self.first + piece.start - self.place.start, piece.stop - piece.start
        band = side * columns
        bands = slice(first // band, -(-(first + numel) // band))
        return bands, first - bands.start * band, numel, columns


def _infinite_for_nan(amax: torch.Tensor) -> torch.Tensor:
    """fp32; not every maximum of two numbers keeps NaN."""
    return amax.float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


class CodedGather:
    """Gathers bf16 weights as FP8 codes (E4M3) into the place that they get in bf16.

        shard of a rank      | weight      | norm | weight    |       bf16
        its message          | codes              | codes     | norm |   1 byte each, then the rest

    The layers quantise what arrives. A weight that was on their grid already, by the same scale,
    stays as it is: codes, then products, have the bits of a gather in bf16 (a test compares them
    over all codes). The largest magnitude of each block is agreed upon first, because shards cut
    blocks. A block with a value that is not finite arrives as NaN.

    layout: of the unit; num_shards: over which it is gathered; coded: numbers of the parameters
    that travel as codes, which layers must read in FP8 alone.
    is_computing: whether the layers, called now, would compute on that grid.
    message_nbytes: of one rank.

    Takes no memory but a few MiB or that of a row of blocks, and what travels plain a few times:
    messages arrive in the last bytes of the place, and each byte is read before it is written.
    """

    def __init__(
        self,
        layout: FlatLayout,
        num_shards: int,
        coded: Collection[int],
        grid: WeightGrid,
        is_computing: Callable[[], bool],
    ):
        self._grid, self.is_computing = grid, is_computing
        self._numel = numel = layout.padded_numel // num_shards
        self._num_blocks, blocks = 0, dict[int, slice]()
        for index in sorted(coded):
            number = grid.num_blocks(layout.slices[index].shape)
            blocks[index] = slice(self._num_blocks, self._num_blocks + number)
            self._num_blocks += number
        self._coded: list[list[_Part]] = []
        self._plain: list[list[slice]] = []
        for start in range(0, layout.padded_numel, numel):
            shard = Range(start, start + numel)
            held = [
                (index, one, slice(piece.start - start, piece.stop - start))
                for index, (one, piece) in enumerate(zip(layout.slices, layout.fragments(shard)))
                if piece.numel
            ]
            self._coded.append(
                [
                    _Part(grid, one.shape, blocks[i], start + part.start - one.range.start, part)
                    for i, one, part in held
                    if i in blocks
                ]
            )
            self._plain.append([part for i, _, part in held if i not in blocks])
        most_plain = max(sum(part.stop - part.start for part in one) for one in self._plain)
        self.message_nbytes = numel + 2 * round_up(most_plain, PARAM_ALIGNMENT_NUMEL)

    @property
    def is_shorter(self) -> bool:
        """Whether less travels than in bf16."""
        return self.message_nbytes < 2 * self._numel

    def steps(
        self, shard: torch.Tensor, place: int, full: torch.Tensor, axes: Sequence[AxisGroup]
    ) -> Steps:
        """As all_gather_steps.

        shard: this rank's, 1-D, bf16; place: its number in `full`, where all of it arrives, 1-D,
        bf16, apart from `shard`.
        """
        amax = self._magnitudes(shard, place)
        yield from completed(all_reduce_steps(amax, axes, dist.ReduceOp.MAX))
        scales = self._grid.scales(amax)
        wire = full.view(torch.uint8)[-self.message_nbytes * len(self._coded) :]
        own = wire[place * self.message_nbytes :][: self.message_nbytes]
        self._encode(shard, place, scales, own)
        last = yield from all_gather_steps(own, wire, axes)
        return followed_by(last, partial(self._decode, wire, 1 / scales, full))

    def _magnitudes(self, shard: torch.Tensor, place: int) -> torch.Tensor:
        """The largest of what this rank holds of each block, fp32."""
        amax = torch.zeros(self._num_blocks, dtype=torch.float32, device=shard.device)
        for part in self._coded[place]:
            for some in part.pieces():
                part.raise_to(amax, some, shard[some])
        return amax

    def _encode(
        self, shard: torch.Tensor, place: int, scales: torch.Tensor, message: torch.Tensor
    ) -> None:
        codes = message[: self._numel].view(CODE)
        for part in self._coded[place]:
            for some in part.pieces():
                codes[some].copy_(shard[some] * part.spread(scales, some))
        rest = message[self._numel :].view(shard.dtype)
        for source, target in _beside(self._plain[place]):
            rest[target].copy_(shard[source])

    def _decode(self, wire: torch.Tensor, inverses: torch.Tensor, full: torch.Tensor) -> None:
        messages = wire.view(len(self._coded), self.message_nbytes)
        for place, message in enumerate(messages):
            target = full[place * self._numel :][: self._numel]
            # From front to back, two bytes are written for each one that is read: pieces from the
            # `ahead`th on would be written before they are read.
            ahead = message.data_ptr() - target.data_ptr()
            late = message[ahead:].clone() if ahead < self._numel else message[self._numel :]
            ahead = min(ahead, self._numel)
            for part in self._coded[place]:
                for some in part.pieces():
                    is_late, length = some.start >= ahead, some.stop - some.start
                    codes = late[some.start - ahead :] if is_late else message[some.start :]
                    values = codes[:length].view(CODE).to(full.dtype)
                    torch.mul(values, part.spread(inverses, some), out=target[some])
            rest = late[self._numel - ahead :].view(full.dtype)
            for back, source in _beside(self._plain[place]):
                target[back].copy_(rest[source])


def _beside(parts: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Each part, and where it lies when they lie one after the other."""
    offset, found = 0, list[tuple[slice, slice]]()
    for part in parts:
        length = part.stop - part.start
        found.append((part, slice(offset, offset + length)))
        offset += length
    return found
