# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers weights as codes of FP8 or FP4, for layers that compute with them in that format."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, starmap
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_asynchzp.engine.comm.block_formats import BlockFormat, Blocks
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

_MOST_AT_ONCE = 2**20  # elements that are converted through fp32 at a time
_LEVELS_ALIGNMENT = 32  # bytes

_Levels = Sequence[Tensor]  # of each part


@dataclass(frozen=True)
class _Part:
    """The part of a weight that lies in a shard. A band is a row of blocks."""

    number: int  # among the weights that travel as codes
    columns: int  # of the weight
    rows: int  # of a block
    width: int  # columns of a block
    first: int  # index in the weight of the part's first element
    place: slice  # of the part, in the shard
    is_one_block: bool = False  # the whole weight is a block, as if it were a single row

    @property
    def band_numel(self) -> int:
        return self.rows * self.columns

    @property
    def blocks_per_band(self) -> int:
        return -(-self.columns // self.width)

    @property
    def num_blocks(self) -> int:
        bands = self._bands(self.place)[0]
        return (bands.stop - bands.start) * self.blocks_per_band

    def cut_bands(self) -> Iterator[tuple[int, slice]]:
        """Yield each band with blocks that an end of the part cuts, and its blocks here."""
        for end in (self.first, self.first + self.place.stop - self.place.start):
            band, inside = divmod(end, self.band_numel)
            if inside and not (self.rows == 1 and inside % self.width == 0):
                begin = (band - self.first // self.band_numel) * self.blocks_per_band
                yield band, slice(begin, begin + self.blocks_per_band)

    def pieces(self) -> list[slice]:
        """Cut the part into pieces of whole bands, of _MOST_AT_ONCE elements if it can."""
        start, stop, most = self.place.start, self.place.stop, _MOST_AT_ONCE
        if not self.is_one_block:
            most = max(most // self.band_numel, 1) * self.band_numel
        ends = [start, *range(start - self.first % most + most, stop, most), stop]
        return list(starmap(slice, pairwise(ends)))

    def magnitudes(self, shard: Tensor) -> Tensor:
        if self.is_one_block:
            amaxes = [shard[piece].abs().amax() for piece in self.pieces()]
            return torch.stack(amaxes).amax(0, keepdim=True).float()
        amax = torch.zeros(self.num_blocks, dtype=torch.float32, device=shard.device)
        wide = self.blocks_per_band * self.width
        for piece in self.pieces():
            bands, before, numel = self._bands(piece)
            padded = shard.new_zeros((bands.stop - bands.start) * self.band_numel)
            padded[before : before + numel].copy_(shard[piece])
            rows = pad(padded.view(-1, self.columns), (0, wide - self.columns))
            blocks = rows.view(-1, self.rows, self.blocks_per_band, self.width)
            amax.view(-1, self.blocks_per_band)[bands] = blocks.abs().amax((1, 3)).float()
        return amax

    def expand(self, piece: slice, of_blocks: Tensor) -> Tensor:
        """Return each element's block value; a single one if the weight is one block."""
        if self.is_one_block:  # 1-D: torch would round a 0-dim tensor to bf16
            return of_blocks
        bands, before, numel = self._bands(piece)
        rows = of_blocks.view(-1, self.blocks_per_band)[bands].repeat_interleave(self.width, 1)
        rows = rows[:, : self.columns].repeat_interleave(self.rows, 0)
        return rows.reshape(-1)[before : before + numel]

    def _bands(self, piece: slice) -> tuple[slice, int, int]:
        """Return the bands that a piece touches, among the part's, its offset there, and numel."""
        numel = piece.stop - piece.start
        first = self.first % self.band_numel + piece.start - self.place.start
        bands = slice(first // self.band_numel, -(-(first + numel) // self.band_numel))
        return bands, first - bands.start * self.band_numel, numel


class LowPrecisionGather:
    """Gathers bf16 weights as codes into the memory where they lie in bf16.

        shard of a rank      | weight      | norm | weight    |       bf16
        its message          | codes              | levels | norm |  codes of 1 or 1/2 byte

    The layers quantise the gathered weights again and get the same codes, so products have the
    bits of a gather in bf16 ([Note: codes that come back]). Ranks first agree on the largest
    magnitude of a weight, if its format needs that, and on the levels of blocks that shards cut.

    Messages arrive in the last bytes of `full`, and each byte is read before it is written. So
    further memory is only a few MiB, or a row of blocks, and some copies of the plain rest.
    """

    def __init__(
        self,
        layout: FlatLayout,
        num_shards: int,
        in_codes: Collection[int],  # indices of parameters that layers read in the format alone
        form: BlockFormat,
        is_computing: Callable[[], bool],  # whether the layers, called now, compute in it
    ):
        self._form, self.is_computing = form, is_computing
        self._numel = numel = layout.padded_numel // num_shards
        fitting = [index for index in sorted(in_codes) if form.fits(layout.slices[index].shape)]
        numbers = {index: number for number, index in enumerate(fitting)}
        self._num_weights = len(numbers)
        self._parts: list[list[_Part]] = []  # of each shard
        self._plain: list[list[slice]] = []  # of each shard
        for start in range(0, layout.padded_numel, numel):
            parts, plain = list[_Part](), list[slice]()
            fragments = layout.fragments(Range(start, start + numel))
            for index, (param, piece) in enumerate(zip(layout.slices, fragments)):
                place = slice(piece.start - start, piece.stop - start)
                if index in numbers and piece.numel:
                    columns = param.shape[1] if form.rows else prod(param.shape)
                    first = piece.start - param.range.start
                    shape = columns, form.rows or 1, form.columns or columns
                    parts.append(_Part(numbers[index], *shape, first, place, form.rows is None))
                elif piece.numel:
                    plain.append(place)
            self._parts.append(parts)
            self._plain.append(plain)
        # Where the levels of each cut band lie among all those that ranks agree on.
        self._cut, self._num_cut = dict[tuple[int, int], slice](), 0
        for part in (part for parts in self._parts for part in parts):
            for band, _ in part.cut_bands():
                if (part.number, band) not in self._cut:
                    begin, self._num_cut = self._num_cut, self._num_cut + part.blocks_per_band
                    self._cut[part.number, band] = slice(begin, self._num_cut)
        most = max(sum(part.num_blocks for part in parts) for parts in self._parts)
        self._codes_nbytes = numel // form.codes_per_byte
        self._levels_nbytes = round_up(most * form.level_dtype.itemsize, _LEVELS_ALIGNMENT)
        most_plain = max(sum(part.stop - part.start for part in plain) for plain in self._plain)
        # Bytes that one rank sends.
        self.message_nbytes = self._codes_nbytes + self._levels_nbytes
        self.message_nbytes += 2 * round_up(most_plain, PARAM_ALIGNMENT_NUMEL)

    @property
    def is_shorter(self) -> bool:
        return self.message_nbytes < 2 * self._numel

    def steps(self, shard: Tensor, place: int, full: Tensor, axes: Sequence[AxisGroup]) -> Steps:
        """Gather `shard`, number `place`, into `full`, like all_gather_steps.

        Both are 1-D and bf16 and share no memory.
        """
        parts, form = self._parts[place], self._form
        amaxes = [part.magnitudes(shard) for part in parts]
        wholes = torch.zeros(self._num_weights, dtype=torch.float32, device=shard.device)
        if form.needs_whole:
            for part, amax in zip(parts, amaxes, strict=True):
                wholes[part.number] = amax.max().nan_to_num(torch.inf, torch.inf)
            yield from completed(all_reduce_steps(wholes, axes, dist.ReduceOp.MAX))
        levels = [form.levels(amax, wholes[part.number]) for part, amax in zip(parts, amaxes)]
        if self._num_cut:
            agreed = torch.zeros(self._num_cut, dtype=form.level_dtype, device=shard.device)
            yield from self._agree(agreed, place, levels, axes)
        wire = full.view(torch.uint8)[-self.message_nbytes * len(self._parts) :]
        own = wire[place * self.message_nbytes :][: self.message_nbytes]
        self._encode(shard, place, levels, wholes, own)
        last = yield from all_gather_steps(own, wire, axes)
        return followed_by(last, partial(self._decode, wire, wholes, full))

    def _agree(self, most: Tensor, place: int, levels: _Levels, axes: Sequence[AxisGroup]) -> Steps:
        """Raise the levels of blocks that shards cut to the largest of all ranks."""
        shared = [
            (own[blocks], most[self._cut[part.number, band]])
            for part, own in zip(self._parts[place], levels, strict=True)
            for band, blocks in part.cut_bands()
        ]
        for own, target in shared:
            target.copy_(torch.maximum(target, own))
        yield from completed(all_reduce_steps(most, axes, dist.ReduceOp.MAX))
        for own, target in shared:
            own.copy_(target)

    def _encode(
        self, shard: Tensor, place: int, levels: _Levels, wholes: Tensor, message: Tensor
    ) -> None:
        form, sent = self._form, message[self._codes_nbytes :][: self._levels_nbytes]
        offset, per_byte = 0, form.codes_per_byte
        for part, own in zip(self._parts[place], levels, strict=True):
            for piece in part.pieces():
                blocks = Blocks(own, wholes[part.number], partial(part.expand, piece))
                codes = form.encode(shard[piece], blocks)
                message[piece.start // per_byte : piece.stop // per_byte].copy_(codes)
            sent[offset : offset + own.nbytes].copy_(own.view(torch.uint8))
            offset += own.nbytes
        rest = message[self._codes_nbytes + self._levels_nbytes :].view(shard.dtype)
        for source, target in _packed(self._plain[place]):
            rest[target].copy_(shard[source])

    def _decode(self, wire: Tensor, wholes: Tensor, full: Tensor) -> None:
        form, per_byte = self._form, self._form.codes_per_byte
        messages = wire.view(len(self._parts), self.message_nbytes)
        levels = messages[:, self._codes_nbytes :][:, : self._levels_nbytes].clone()
        of_blocks, of_weights = form.factors(levels.view(form.level_dtype), wholes)
        for place, message in enumerate(messages):
            target = full[place * self._numel :][: self._numel]
            # From front to back, each byte that is read writes 2 * per_byte, which overwrites the
            # message from byte `ahead` on before it is read.
            ahead = (message.data_ptr() - target.data_ptr()) // (2 * per_byte - 1)
            ahead = min(ahead, self._codes_nbytes) // _LEVELS_ALIGNMENT * _LEVELS_ALIGNMENT
            late, offset = message[ahead:].clone(), 0
            for part in self._parts[place]:
                factors = of_blocks[place, offset : offset + part.num_blocks]
                offset += part.num_blocks
                for piece in part.pieces():
                    start, stop = piece.start // per_byte, piece.stop // per_byte
                    codes = late[start - ahead :] if start >= ahead else message[start:]
                    codes, own = codes[: stop - start], part.expand(piece, factors)
                    form.decode(codes, own, of_weights[part.number], target[piece])
            plain = late[self._codes_nbytes + self._levels_nbytes - ahead :].view(full.dtype)
            for back, source in _packed(self._plain[place]):
                target[back].copy_(plain[source])


def _packed(parts: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Return each part with its position when all lie one after the other."""
    ends = accumulate(part.stop - part.start for part in parts)
    return [(part, slice(end + part.start - part.stop, end)) for part, end in zip(parts, ends)]
