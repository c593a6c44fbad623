# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
# (The type checker cannot count the arguments that a launch unpacks from strides.)
"""The fused forward of block mode. Loads triton: import it only to launch a kernel.

Has the arithmetic of reference/block.py in one pass over the keys, and the tiles of all kernels:

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

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.key_shift import ShiftedKeys
from megatron_asynchzp.attention.mask import KeyRanges

# Keys that share a shift; a multiple of every BLOCK_N, so that a tile has one shift.
SHIFT_BLOCK = tl.constexpr(128)
# Numbers of the keys' dtype whose sum is one channel of a shift: in bf16 three hold the 24 bits of
# fp32.
SHIFT_PARTS = tl.constexpr(3)
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
def load_parts(ptr, key, channels, DIM: tl.constexpr):
    first = key // SHIFT_BLOCK * SHIFT_PARTS
    return load_rows(ptr, first, DIM, first + SHIFT_PARTS, channels, PART_ROWS, DIM)


@triton.jit
def score_offsets(q, parts, scale_log2, PRECISION: tl.constexpr):
    """Return psi in base 2: each query adds it to its scores to undo the shift of a block of keys.

    The products are exact in fp32, as those of the scores are.
    """
    return tl.sum(tl.dot(q, tl.trans(parts), input_precision=PRECISION), 1) * scale_log2


LOG2_E = 1.4426950408889634


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    output_ptr,
    lse_ptr,
    start_ptr,
    stop_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    num_heads,
    num_groups,
    num_queries,
    num_keys,
    num_blocks,
    scale_log2,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a tile of queries of a head by an online softmax over its keys.

    lse is in base 2 and in the frame of the shifted keys. It is +inf for a query that attends
    nothing, so that exp2(score - lse) is zero in backward.
    """
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    group = head // (num_heads // num_groups)
    first_row = first_query(BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    channels, value_channels = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    bounds, start, stop = key_tiles(  # pyright: ignore[reportGeneralTypeIssues]
        start_ptr, stop_ptr, rows, num_queries, num_keys, BLOCK_N
    )
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    flat_head = tl.program_id(1).to(tl.int64)
    parts_ptr += (batch.to(tl.int64) * num_groups + group) * num_blocks * SHIFT_PARTS * DIM
    q = load_rows(q_ptr, first_row, q_row, num_queries, channels, BLOCK_M, DIM)
    output = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for part in tl.static_range(3):  # before, within and after the inner tiles, which need no mask
        for first_key in range(bounds[part], bounds[part + 1], BLOCK_N):
            first_key = tl.multiple_of(first_key, BLOCK_N)
            keys = first_key + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, first_key, k_row, num_keys, channels, BLOCK_N, DIM)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            if HAS_SHIFT:
                parts = load_parts(parts_ptr, first_key, channels, DIM)
                score += score_offsets(q, parts, scale_log2, PRECISION)[:, None]
            if part != 1:
                is_attended = (start[:, None] <= keys[None, :]) & (keys[None, :] < stop[:, None])
                score = tl.where(is_attended, score, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(score, 1))
            finite = new_maximum
            if part != 1:  # a row that has attended nothing yet: -inf - (-inf) is NaN
                finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            p = tl.exp2(score - finite[:, None])
            keep = tl.exp2(maximum - finite)
            total = total * keep + tl.sum(p, 1)
            v = load_rows(v_ptr, first_key, v_row, num_keys, value_channels, BLOCK_N, VALUE_DIM)
            output = tl.dot(p.to(v.dtype), v, output * keep[:, None], input_precision=PRECISION)
            maximum = new_maximum
    is_empty = total == 0.0
    output = output / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("inf"), maximum + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(lse_ptr + flat_head * num_queries + rows, lse, mask=rows < num_queries)
    output_ptr += flat_head * num_queries * VALUE_DIM
    store_rows(output_ptr, first_row, num_queries, value_channels, output, BLOCK_M, VALUE_DIM)


def shift_parts(shifted: ShiftedKeys) -> torch.Tensor:
    """Split score_shift_BGJD into SHIFT_PARTS summands, [B, G, J, P, D], for a matrix unit.

    Each has the dtype of the keys. No part overflows where the sum does not fit.
    """
    dtype = shifted.keys_BGTD.dtype
    largest = torch.finfo(dtype).max
    rest_BGJD, parts = shifted.score_shift_BGJD(), []
    for _ in range(SHIFT_PARTS.value):
        parts.append(rest_BGJD.clamp(-largest, largest).to(dtype))
        rest_BGJD = rest_BGJD - parts[-1]
    return torch.stack(parts, 3)


def fused_forward(
    call: AttentionCall, shifted: ShiftedKeys, ranges: KeyRanges
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, H, S, E] and the base-2 LSE of the shifted scores [B, H, S].

    Channels of q, k and v must be contiguous; `shifted` has blocks of SHIFT_BLOCK keys, or one.
    """
    q, k, v = call.q_BHSD, shifted.keys_BGTD, call.v_BGTE
    (batch, heads, queries, dim), (_, groups, keys, value_dim) = q.shape, v.shape
    assert shifted.is_global or shifted.block_size == SHIFT_BLOCK.value
    # Poisoned: whatever the kernel forgets to write is seen.
    output = q.new_full((batch, heads, queries, value_dim), float("nan"))
    lse = q.new_full((batch, heads, queries), float("nan"), dtype=torch.float32)
    config = tile_config(FORWARD, max(dim, value_dim), q.dtype)
    forward_kernel[triton.cdiv(queries, config.block_m), batch * heads](
        q,
        k,
        v,
        shift_parts(shifted),
        output,
        lse,
        *ranges,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        heads,
        groups,
        queries,
        keys,
        shifted.shift_BGJD.shape[2],
        call.scale * LOG2_E,
        DIM=dim,
        VALUE_DIM=value_dim,
        PADDED_DIM=padded_dim(dim),
        PADDED_VALUE_DIM=padded_dim(value_dim),
        HAS_SHIFT=not shifted.is_global,
        PRECISION=precision_of(q.dtype),
        **as_options(config),
    )
    return output, lse


def precision_of(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
