# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The offsets of parameters in a unit's flat buffer."""

from collections.abc import Iterable
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
