# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the offsets of parameters in a unit's flat buffer."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megatron_asynchzp.sharding.topology import Range

PARAM_ALIGNMENT_NUMEL = 64
"""Every parameter and every shard starts at a multiple of this many elements (128 bytes in
bf16), which is what GEMMs, vectorised optimizers and NCCL want."""
FP32_NBYTES = 4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlice:
    """Name, shape and half-open element range of one parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    range: Range


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of one unit, in order, in one flat buffer that divides over `num_shards` ranks.

        | weight | pad | bias | pad | ... | padding to num_shards x alignment |

    A function of names, shapes and `num_shards` alone: ranks that hold the same parameters
    (tensor-parallel peers, both ends of a tied embedding) get the same layout, so element-wise
    collectives between them work on shards.
    """

    slices: tuple[ParamSlice, ...]
    numel: int
    padded_numel: int

    @classmethod
    def build(cls, params: Iterable[tuple[str, tuple[int, ...]]], num_shards: int) -> "FlatLayout":
        """Lay out (name, shape) pairs; raises ValueError for a repeated name."""
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
        """Return `shard`'s part of each parameter, in flat coordinates; empty ranges included."""
        return [piece.range.intersect(shard) for piece in self.slices]
