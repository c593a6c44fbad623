# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of the fused kernels. Loads triton: import it only to launch a kernel.

queries of a tile, sorted; x attended, . not            keys ->
start, stop of the first     . . x x x x x x . . . . . .
start, stop of the last      . . . . . x x x x x x x . .
first  |inner|          last
Between `first` and `last` some query attends; within `inner` all of them do.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Keys that share a shift; a multiple of every BLOCK_N, so that a tile has one shift.
SHIFT_BLOCK = 128
# Numbers of the keys' dtype whose sum is one channel of a shift: in bf16 three hold the 24 bits of
# fp32.
SHIFT_PARTS = 3
# Rows of the matrix that they make up, the rest zeros: with fewer Triton 3.7 does not use sm_90's
# matrix unit, which reads the queries from shared memory, but an older one that needs registers.
PART_ROWS = tl.constexpr(16)


class TileConfig(NamedTuple):
    """Queries and keys of a tile, and how a tile is computed."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head dimension. Chosen so that nothing spills, see test_triton_compiled.
FORWARD = {
    64: TileConfig(128, 64, 8, 3),
    128: TileConfig(128, 64, 8, 3),
    256: TileConfig(64, 32, 8, 2),
}
BACKWARD_KV = {
    64: TileConfig(32, 128, 8, 3),
    128: TileConfig(32, 64, 8, 1),
    256: TileConfig(32, 32, 8, 1),
}
# Elsewhere than on sm_90. A tile that is loaded ahead would spill there; 64 queries with 128
# channels would on sm_90.
BACKWARD_KV_ELSEWHERE = {
    64: TileConfig(32, 128, 8, 1),
    128: TileConfig(64, 64, 8, 1),
    256: TileConfig(32, 32, 8, 1),
}
BACKWARD_Q = {
    64: TileConfig(128, 64, 8, 2),
    128: TileConfig(64, 64, 8, 3),
    256: TileConfig(32, 32, 8, 1),
}
# Where every operand takes twice the memory, and for other GPUs: small and safe.
WIDE = TileConfig(32, 32, 4, 1)


def backward_kv_table(capability: tuple[int, int]) -> dict[int, TileConfig]:
    return BACKWARD_KV if capability[0] == 9 else BACKWARD_KV_ELSEWHERE


def tile_config(table: dict[int, TileConfig], dim: int, dtype: torch.dtype) -> TileConfig:
    padded = padded_dim(dim)
    if dtype == torch.float32 or padded > 256:
        return WIDE
    return table[max(64, padded)]


def padded_dim(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))  # pyright: ignore[reportReturnType]


def as_options(config: TileConfig) -> dict:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


@triton.jit
def first_query(BLOCK_M: tl.constexpr):
    """Return the first query of this program's tile.

    Programs start by index, and a later causal tile is longer: the longest tiles go first, so that
    the last programs to start are short.
    """
    return (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M


@triton.jit
def key_tiles(start_ptr, stop_ptr, rows, num_queries, num_keys, BLOCK_N: tl.constexpr):
    """Return first, inner begin, inner end and last of the tile, and the ranges of its rows.

    They are keys, multiples of BLOCK_N except for the last. All rows attend all inner keys, which
    need no mask. Rows past the end attend nothing and narrow nothing.
    """
    is_row = rows < num_queries
    start = tl.load(start_ptr + rows, mask=is_row, other=0)
    stop = tl.load(stop_ptr + rows, mask=is_row, other=0)
    first = tl.min(tl.where(is_row, start, num_keys)) // BLOCK_N * BLOCK_N
    last = tl.max(stop)
    inner_begin = (tl.max(start) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    inner_end = tl.min(tl.where(is_row, stop, num_keys)) // BLOCK_N * BLOCK_N
    # `first` is one of the boundaries: a tile without rows of its own ends up empty.
    inner_begin = tl.maximum(first, tl.minimum(inner_begin, last))
    inner_end = tl.maximum(inner_begin, inner_end)
    return (first, inner_begin, inner_end, last), start, stop


@triton.jit
def load_rows(ptr, first, stride, limit, channels, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Load rows first <= i < first + BLOCK of a matrix with contiguous channels, zeros outside.

    The address of the first row has 64 bits, those within a tile have 32 (see within_tiles).
    """
    rows = tl.arange(0, BLOCK)
    is_in = (rows < limit - first)[:, None] & (channels < DIM)[None, :]
    ptr += tl.cast(first, tl.int64) * stride
    return tl.load(ptr + rows[:, None] * stride + channels[None, :], mask=is_in, other=0.0)


@triton.jit
def store_rows(ptr, first, limit, channels, value, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Store `value` into a matrix of `limit` rows of DIM contiguous channels."""
    rows = tl.arange(0, BLOCK)
    is_in = (rows < limit - first)[:, None] & (channels < DIM)[None, :]
    ptr += tl.cast(first, tl.int64) * DIM
    value = value.to(ptr.dtype.element_ty)
    tl.store(ptr + rows[:, None] * DIM + channels[None, :], value, mask=is_in)


@triton.jit
def load_parts(
    ptr, key, channels, DIM: tl.constexpr, SHIFT_BLOCK: tl.constexpr, SHIFT_PARTS: tl.constexpr
):
    first = key // SHIFT_BLOCK * SHIFT_PARTS
    limit = first + SHIFT_PARTS
    return load_rows(ptr, first, DIM, limit, channels, PART_ROWS, DIM)


@triton.jit
def score_offsets(q, parts, scale_log2, PRECISION: tl.constexpr):
    """Return psi in base 2: each query adds it to its scores to undo the shift of a block of keys.

    The products are exact in fp32, as those of the scores are.
    """
    return tl.sum(tl.dot(q, tl.trans(parts), input_precision=PRECISION), 1) * scale_log2
