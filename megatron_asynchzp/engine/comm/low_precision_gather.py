# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers weights in FP8, one byte each, for layers that compute with them in FP8.

Weights travel on the grid of those layers, so nothing is lost.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from math import prod

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    completed,
    followed_by,
)
from megatron_asynchzp.engine.sharding.layout import PARAM_ALIGNMENT_NUMEL, FlatLayout, round_up
from megatron_asynchzp.engine.sharding.topology import Range

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
_FP32_MAX = torch.finfo(torch.float32).max
_MOST_AT_ONCE = 2**20  # elements that are converted through fp32 at a time


@dataclass(frozen=True)
class WeightGrid:
    """One scale for each weight, or for each block of a 2-D weight, from its largest magnitude.

    These are Transformer Engine's Float8CurrentScaling and Float8BlockScaling.
    """

    is_power: bool = False  # whether scales are powers of two
    epsilon: float = 0.0  # lower bound of the largest magnitude
    side: int | None = None  # rows and columns of a block; None: the whole weight is one block

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scale of each block from its largest magnitude `amax` (fp32).

        They are the layers' scales (recipe_common.cuh, compute_scale_from_amax) for finite blocks
        that are not all zero. An infinite amax gives 0, and its block becomes 0 / 0.
        """
        raised = amax.clamp_min(self.epsilon)
        scale = (torch.full_like(raised, _FP8_MAX) / raised).clamp_max(_FP32_MAX)
        if self.is_power:  # clear the mantissa
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        return scale

    def num_blocks(self, shape: Sequence[int]) -> int:
        return prod(-(-size // self.side) for size in shape) if self.side else 1


@dataclass(frozen=True)
class _Fp8Part:
    grid: WeightGrid
    shape: tuple[int, ...]  # of the weight; 2-D if blocks have a side
    blocks: slice  # of the weight, among all blocks of the unit
    first: int  # index in the weight of the part's first element
    place: slice  # of the part, in the shard

    def pieces(self) -> list[slice]:
        """Cut the part into pieces of whole rows of blocks, of _MOST_AT_ONCE elements if it can."""
        start, stop, most = self.place.start, self.place.stop, _MOST_AT_ONCE
        if self.grid.side:
            band = self.grid.side * self.shape[1]
            most = max(most // band, 1) * band
        ends = [start, *range(start - self.first % most + most, stop, most), stop]
        return list(starmap(slice, pairwise(ends)))

    def raise_to(self, amax: torch.Tensor, piece: slice, values: torch.Tensor) -> None:
        """Raise the blocks' `amax` (fp32) to the magnitudes of `values`, a piece's elements."""
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

    def expand(self, block_values: torch.Tensor, piece: slice) -> torch.Tensor:
        """Return each element's block value; a single one if the weight is one block."""
        own = block_values[self.blocks]
        if self.grid.side is None:  # 1-D: torch would round a 0-dim tensor to bf16
            return own
        side, (bands, before, numel, columns) = self.grid.side, self._bands(piece)
        rows = own.view(-1, -(-columns // side))[bands].repeat_interleave(side, 1)[:, :columns]
        return rows.repeat_interleave(side, 0).reshape(-1)[before : before + numel]

    def _bands(self, piece: slice) -> tuple[slice, int, int, int]:
        """Return the rows of blocks that a piece touches, its offset in them, numel and columns."""
        side, columns = self.grid.side or 1, self.shape[1]
        first, numel = self.first + piece.start - self.place.start, piece.stop - piece.start
        band = side * columns
        bands = slice(first // band, -(-(first + numel) // band))
        return bands, first - bands.start * band, numel, columns


def _infinite_for_nan(amax: torch.Tensor) -> torch.Tensor:
    """Return `amax` in fp32 with inf for NaN, because not every maximum keeps a NaN."""
    return amax.float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


class Fp8Gather:
    """Gathers bf16 weights in FP8 (E4M3) into the memory where they lie in bf16.

        shard of a rank      | weight      | norm | weight    |       bf16
        its message          | FP8                | FP8       | norm |   1 byte each, then the rest

    The layers quantise the gathered weights again. Weights on their grid, by the same scale, do not
    change, so products have the bits of a gather in bf16 (a test compares all FP8 numbers). Ranks
    first agree on the largest magnitude of each block, because shards cut blocks. A block with a
    value that is not finite arrives as NaN.

    Messages arrive in the last bytes of `full`, and each byte is read before it is written. So
    further memory is only a few MiB, or a row of blocks, and some copies of the plain rest.
    """

    def __init__(
        self,
        layout: FlatLayout,
        num_shards: int,
        in_fp8: Collection[int],  # indices of parameters that layers read in FP8 alone
        grid: WeightGrid,
        is_computing: Callable[[], bool],  # whether the layers, called now, compute on the grid
    ):
        self._grid, self.is_computing = grid, is_computing
        self._numel = numel = layout.padded_numel // num_shards
        self._num_blocks, blocks = 0, dict[int, slice]()
        for index in sorted(in_fp8):
            number = grid.num_blocks(layout.slices[index].shape)
            blocks[index] = slice(self._num_blocks, self._num_blocks + number)
            self._num_blocks += number
        self._fp8_parts: list[list[_Fp8Part]] = []  # of each shard
        self._plain: list[list[slice]] = []  # of each shard
        for start in range(0, layout.padded_numel, numel):
            shard = Range(start, start + numel)
            parts, plain = list[_Fp8Part](), list[slice]()
            fragments = layout.fragments(shard)
            for index, (param, piece) in enumerate(zip(layout.slices, fragments)):
                place = slice(piece.start - start, piece.stop - start)
                first = piece.start - param.range.start
                if index in blocks and piece.numel:
                    parts.append(_Fp8Part(grid, param.shape, blocks[index], first, place))
                elif piece.numel:
                    plain.append(place)
            self._fp8_parts.append(parts)
            self._plain.append(plain)
        most_plain = max(sum(part.stop - part.start for part in plain) for plain in self._plain)
        # Bytes that one rank sends.
        self.message_nbytes = numel + 2 * round_up(most_plain, PARAM_ALIGNMENT_NUMEL)

    @property
    def is_shorter(self) -> bool:
        return self.message_nbytes < 2 * self._numel

    def steps(
        self, shard: torch.Tensor, place: int, full: torch.Tensor, axes: Sequence[AxisGroup]
    ) -> Steps:
        """Gather `shard`, number `place`, into `full`, like all_gather_steps.

        Both are 1-D and bf16 and share no memory.
        """
        amax = self._magnitudes(shard, place)
        yield from completed(all_reduce_steps(amax, axes, dist.ReduceOp.MAX))
        scales = self._grid.scales(amax)
        wire = full.view(torch.uint8)[-self.message_nbytes * len(self._fp8_parts) :]
        own = wire[place * self.message_nbytes :][: self.message_nbytes]
        self._encode(shard, place, scales, own)
        last = yield from all_gather_steps(own, wire, axes)
        return followed_by(last, partial(self._decode, wire, 1 / scales, full))

    def _magnitudes(self, shard: torch.Tensor, place: int) -> torch.Tensor:
        amax = torch.zeros(self._num_blocks, dtype=torch.float32, device=shard.device)
        for part in self._fp8_parts[place]:
            for piece in part.pieces():
                part.raise_to(amax, piece, shard[piece])
        return amax

    def _encode(
        self, shard: torch.Tensor, place: int, scales: torch.Tensor, message: torch.Tensor
    ) -> None:
        codes = message[: self._numel].view(FP8)
        for part in self._fp8_parts[place]:
            for piece in part.pieces():
                codes[piece].copy_(shard[piece] * part.expand(scales, piece))
        rest = message[self._numel :].view(shard.dtype)
        for source, target in _packed(self._plain[place]):
            rest[target].copy_(shard[source])

    def _decode(self, wire: torch.Tensor, inverses: torch.Tensor, full: torch.Tensor) -> None:
        messages = wire.view(len(self._fp8_parts), self.message_nbytes)
        for place, message in enumerate(messages):
            target = full[place * self._numel :][: self._numel]
            # The message lies `ahead` bytes behind its target. Each byte that is read becomes two,
            # so decoding overwrites bytes from `ahead` on before it reads them: copy these first.
            ahead = message.data_ptr() - target.data_ptr()
            late = message[ahead:].clone() if ahead < self._numel else message[self._numel :]
            ahead = min(ahead, self._numel)
            for part in self._fp8_parts[place]:
                for piece in part.pieces():
                    is_late, length = piece.start >= ahead, piece.stop - piece.start
                    codes = late[piece.start - ahead :] if is_late else message[piece.start :]
                    values = codes[:length].view(FP8).to(full.dtype)
                    torch.mul(values, part.expand(inverses, piece), out=target[piece])
            rest = late[self._numel - ahead :].view(full.dtype)
            for back, source in _packed(self._plain[place]):
                target[back].copy_(rest[source])


def _packed(parts: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Return each part with its position when all lie one after the other."""
    offset, pairs = 0, list[tuple[slice, slice]]()
    for part in parts:
        length = part.stop - part.start
        pairs.append((part, slice(offset, offset + length)))
        offset += length
    return pairs
