# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
# (The type checker cannot count the arguments that a launch unpacks from strides.)
"""The fused backward of block mode. Loads triton: import it only to launch a kernel.

One kernel walks queries for dK and dV, one walks keys for dQ, so that every sum has one order and
none is atomic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_asynchzp.attention.call import AttentionCall, AttentionGradients
from megatron_asynchzp.attention.key_shift import ShiftedKeys
from megatron_asynchzp.attention.mask import KeyRanges
from megatron_asynchzp.attention.triton_forward import (
    BACKWARD_Q,
    LOG2_E,
    SHIFT_BLOCK,
    SHIFT_PARTS,
    as_options,
    backward_kv_table,
    first_query,
    key_tiles,
    load_parts,
    load_rows,
    padded_dim,
    precision_of,
    score_offsets,
    shift_parts,
    store_rows,
    tile_config,
)


@triton.jit
def delta_kernel(
    d_output_ptr,
    output_ptr,
    delta_ptr,
    do_batch,
    do_head,
    do_row,
    o_batch,
    o_head,
    o_row,
    num_heads,
    num_queries,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """D = rowsum(dO o O), in fp32."""
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, PADDED_VALUE_DIM)
    d_output_ptr += batch.to(tl.int64) * do_batch + head.to(tl.int64) * do_head
    output_ptr += batch.to(tl.int64) * o_batch + head.to(tl.int64) * o_head
    d_output = load_rows(d_output_ptr, first_row, do_row, num_queries, channels, BLOCK_M, VALUE_DIM)
    output = load_rows(output_ptr, first_row, o_row, num_queries, channels, BLOCK_M, VALUE_DIM)
    delta = tl.sum(d_output.to(tl.float32) * output.to(tl.float32), 1)
    delta_ptr += tl.program_id(1).to(tl.int64) * num_queries
    tl.store(delta_ptr + rows, delta, mask=rows < num_queries)


@triton.jit
def backward_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_output_ptr,
    lse_ptr,
    delta_ptr,
    parts_ptr,
    dk_ptr,
    dv_ptr,
    row_first_ptr,
    row_last_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    do_batch,
    do_head,
    do_row,
    num_heads,
    num_groups,
    num_queries,
    num_keys,
    num_blocks,
    scale,
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
    """Compute dK and dV of a tile of keys, over the query heads that share them.

    If a tile has several programs (see head_splits), each takes its part of these heads and writes
    its part of the sum.
    """
    batch, group = tl.program_id(1) // num_groups, tl.program_id(1) % num_groups
    repeats = num_heads // num_groups // tl.num_programs(2)
    first_head = (group * tl.num_programs(2) + tl.program_id(2)) * repeats
    first_key = tl.program_id(0) * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    channels, value_channels = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    # Queries of the first and of the last key; those that attend both attend all between.
    end_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    begin, inner_end = tl.load(row_first_ptr + first_key), tl.load(row_last_ptr + first_key)
    inner_begin, end = tl.load(row_first_ptr + end_key), tl.load(row_last_ptr + end_key)
    inner_begin = tl.minimum(inner_begin, end)
    inner_end = tl.maximum(inner_begin, tl.minimum(inner_end, end))
    # A key is attended by these queries and by no other: both ends of a query's range only rise.
    row_first = tl.load(row_first_ptr + keys, mask=keys < num_keys, other=0)
    row_last = tl.load(row_last_ptr + keys, mask=keys < num_keys, other=0)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    flat_group = tl.program_id(1).to(tl.int64)
    parts_ptr += flat_group * num_blocks * SHIFT_PARTS * DIM
    k = load_rows(k_ptr, first_key, k_row, num_keys, channels, BLOCK_N, DIM)
    v = load_rows(v_ptr, first_key, v_row, num_keys, value_channels, BLOCK_N, VALUE_DIM)
    parts = load_parts(parts_ptr, first_key, channels, DIM)
    shift = tl.sum(parts.to(tl.float32), 0)
    dk = tl.zeros([BLOCK_N, PADDED_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED_VALUE_DIM], tl.float32)
    for repeat in range(repeats):
        head = (first_head + repeat).to(tl.int64)
        flat_head = batch.to(tl.int64) * num_heads + head
        q_at = q_ptr + batch.to(tl.int64) * q_batch + head * q_head
        do_at = d_output_ptr + batch.to(tl.int64) * do_batch + head * do_head
        lse_at, delta_at = lse_ptr + flat_head * num_queries, delta_ptr + flat_head * num_queries
        # The inner queries, which attend all keys; then, masked, those before and after them in one
        # loop: a third loop costs registers. Scores are transposed: [keys, queries].
        for is_masked in tl.static_range(2):
            num_before = tl.cdiv(inner_begin - begin, BLOCK_M)
            num_tiles = tl.cdiv(inner_end - inner_begin, BLOCK_M)
            if is_masked:
                num_tiles = num_before + tl.cdiv(end - inner_end, BLOCK_M)
            for tile in range(num_tiles):
                first_row, stop_row = inner_begin + tile * BLOCK_M, inner_end
                if is_masked:
                    is_before = tile < num_before
                    after = inner_end + (tile - num_before) * BLOCK_M
                    first_row = tl.where(is_before, begin + tile * BLOCK_M, after)
                    stop_row = tl.where(is_before, inner_begin, end)
                rows = first_row + tl.arange(0, BLOCK_M)
                is_row = rows < stop_row
                q = load_rows(q_at, first_row, q_row, stop_row, channels, BLOCK_M, DIM)
                d_output = load_rows(
                    do_at, first_row, do_row, stop_row, value_channels, BLOCK_M, VALUE_DIM
                )
                lse = tl.load(lse_at + rows, mask=is_row, other=float("inf"))
                delta = tl.load(delta_at + rows, mask=is_row, other=0.0)
                score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2
                if HAS_SHIFT:
                    # One shift for all queries: a dot product of each, in fp32.
                    lse -= tl.sum(q.to(tl.float32) * shift[None, :], 1) * scale_log2
                p = tl.exp2(score - lse[None, :])
                if is_masked:
                    is_attended = (row_first[:, None] <= rows[None, :]) & (
                        rows[None, :] < row_last[:, None]
                    )
                    p = tl.where(is_attended, p, 0.0)
                dv = tl.dot(p.to(d_output.dtype), d_output, dv, input_precision=PRECISION)
                dp = tl.dot(v, tl.trans(d_output), input_precision=PRECISION)
                ds = (p * (dp - delta[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    flat_output = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + flat_group
    dk_ptr += flat_output * num_keys * DIM
    dv_ptr += flat_output * num_keys * VALUE_DIM
    store_rows(dk_ptr, first_key, num_keys, channels, dk * scale, BLOCK_N, DIM)
    store_rows(dv_ptr, first_key, num_keys, value_channels, dv, BLOCK_N, VALUE_DIM)


@triton.jit
def backward_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_output_ptr,
    lse_ptr,
    delta_ptr,
    parts_ptr,
    shift_ptr,
    dq_ptr,
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
    do_batch,
    do_head,
    do_row,
    num_heads,
    num_groups,
    num_queries,
    num_keys,
    num_blocks,
    scale,
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
    """Compute dQ of a tile of queries of a head.

    Adds r_J (c_J - mean(K)) of each block J of keys; a global shift multiplies the sum of r at the
    end.
    """
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    group = head // (num_heads // num_groups)
    flat_head = tl.program_id(1).to(tl.int64)
    first_row = first_query(BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < num_queries
    channels, value_channels = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    bounds, start, stop = key_tiles(  # pyright: ignore[reportGeneralTypeIssues]
        start_ptr, stop_ptr, rows, num_queries, num_keys, BLOCK_N
    )
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    d_output_ptr += batch.to(tl.int64) * do_batch + head.to(tl.int64) * do_head
    flat_group = batch.to(tl.int64) * num_groups + group
    parts_ptr += flat_group * num_blocks * SHIFT_PARTS * DIM
    shift_ptr += flat_group * num_blocks * DIM
    q = load_rows(q_ptr, first_row, q_row, num_queries, channels, BLOCK_M, DIM)
    d_output = load_rows(
        d_output_ptr, first_row, do_row, num_queries, value_channels, BLOCK_M, VALUE_DIM
    )
    lse = tl.load(lse_ptr + flat_head * num_queries + rows, mask=is_row, other=float("inf"))
    delta = tl.load(delta_ptr + flat_head * num_queries + rows, mask=is_row, other=0.0)
    dq = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    r = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):  # before, within and after the inner tiles, which need no mask
        for first_key in range(bounds[part], bounds[part + 1], BLOCK_N):
            first_key = tl.multiple_of(first_key, BLOCK_N)
            keys = first_key + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, first_key, k_row, num_keys, channels, BLOCK_N, DIM)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            shifted_lse = lse
            if HAS_SHIFT:
                parts = load_parts(parts_ptr, first_key, channels, DIM)
                shifted_lse -= score_offsets(q, parts, scale_log2, PRECISION)
            p = tl.exp2(score - shifted_lse[:, None])
            if part != 1:
                is_attended = (start[:, None] <= keys[None, :]) & (keys[None, :] < stop[:, None])
                p = tl.where(is_attended, p, 0.0)
            v = load_rows(v_ptr, first_key, v_row, num_keys, value_channels, BLOCK_N, VALUE_DIM)
            dp = tl.dot(d_output, tl.trans(v), input_precision=PRECISION)
            ds = (p * (dp - delta[:, None])).to(k.dtype)
            dq = tl.dot(ds, k, dq, input_precision=PRECISION)
            r_block = tl.sum(ds.to(tl.float32), 1)
            if HAS_SHIFT:
                block_shift = tl.load(
                    shift_ptr + first_key // SHIFT_BLOCK * DIM + channels,
                    mask=channels < DIM,
                    other=0.0,
                )
                dq += r_block[:, None] * block_shift[None, :]
            else:
                r += r_block
    if not HAS_SHIFT:
        shift = tl.load(shift_ptr + channels, mask=channels < DIM, other=0.0)
        dq += r[:, None] * shift[None, :]
    dq_ptr += flat_head * num_queries * DIM
    store_rows(dq_ptr, first_row, num_queries, channels, dq * scale, BLOCK_M, DIM)


class _Device(NamedTuple):
    """The device's compute capability, and how many programs it surely runs at once."""

    capability: tuple[int, int]
    num_processors: int

    @classmethod
    def of(cls, device: torch.device) -> "_Device":
        if device.type != "cuda":  # Triton's interpreter has no tiles of its own: as an H100
            return cls((9, 0), 132)
        properties = torch.cuda.get_device_properties(device)
        return cls((properties.major, properties.minor), properties.multi_processor_count)


def head_splits(num_programs: int, num_heads: int, num_processors: int) -> int:
    """Return how many programs share the query heads of a key head.

    It is the smallest divisor of `num_heads` that gives every processor of the device a program.
    """
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    enough = (n for n in divisors if n * num_programs >= num_processors)
    return next(enough, num_heads)


def fused_backward(
    d_output_BHSE: torch.Tensor,
    call: AttentionCall,
    shifted: ShiftedKeys,
    output_BHSE: torch.Tensor,
    lse_BHS: torch.Tensor,
    ranges: KeyRanges,
) -> AttentionGradients:
    """Compute the gradients of q, k and v from output_BHSE and lse_BHS of fused_forward."""
    q, k, v = call.q_BHSD, shifted.keys_BGTD, call.v_BGTE
    (batch, heads, queries, dim), (_, groups, keys, value_dim) = q.shape, v.shape
    if d_output_BHSE.stride(-1) != 1:
        d_output_BHSE = d_output_BHSE.contiguous()
    delta = _delta(d_output_BHSE, output_BHSE)
    dq, dk, dv = (x.new_full(x.shape, float("nan")) for x in (q, k, v))
    rows_of_keys = ranges.transposed(keys)
    strides = [s for x in (q, k, v, d_output_BHSE) for s in x.stride()[:3]]
    sizes = [heads, groups, queries, keys, shifted.shift_BGJD.shape[2]]
    # fmt: off
    constants = {
        "DIM": dim, "VALUE_DIM": value_dim, "PADDED_DIM": padded_dim(dim),
        "PADDED_VALUE_DIM": padded_dim(value_dim), "HAS_SHIFT": not shifted.is_global,
        "PRECISION": precision_of(q.dtype),
    }
    # fmt: on
    scales = [call.scale, call.scale * LOG2_E]
    inputs = [q, k, v, d_output_BHSE, lse_BHS, delta, shift_parts(shifted)]

    device = _Device.of(q.device)
    kv_tiles = backward_kv_table(device.capability)
    num_tiles = -(-keys // tile_config(kv_tiles, max(dim, value_dim), q.dtype).block_n)
    splits = head_splits(num_tiles * batch * groups, heads // groups, device.num_processors)
    # Sums of parts are added up in fp32.
    dk_parts, dv_parts = (
        x if splits == 1 else x.new_full((splits, *x.shape), float("nan"), dtype=torch.float32)
        for x in (dk, dv)
    )

    def launch(kernel, table, grid, *arguments):
        config = tile_config(table, max(dim, value_dim), q.dtype)
        kernel[grid](*arguments, **constants, **as_options(config))

    launch(
        backward_kv_kernel,
        kv_tiles,
        lambda meta: (triton.cdiv(keys, meta["BLOCK_N"]), batch * groups, splits),
        *inputs,
        dk_parts,
        dv_parts,
        *rows_of_keys,
        *strides,
        *sizes,
        *scales,
    )
    if splits > 1:
        dk, dv = (parts.sum(0).to(x.dtype) for parts, x in ((dk_parts, dk), (dv_parts, dv)))
    shift_BGJD = shifted.gradient_shift_BGJD().contiguous()
    launch(
        backward_q_kernel,
        BACKWARD_Q,
        lambda meta: (triton.cdiv(queries, meta["BLOCK_M"]), batch * heads),
        *inputs,
        shift_BGJD,
        dq,
        *ranges,
        *strides,
        *sizes,
        *scales,
    )
    return AttentionGradients(dq, dk, dv)


def _delta(d_output_BHSE: torch.Tensor, output_BHSE: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, value_dim = output_BHSE.shape
    delta = output_BHSE.new_empty((batch, heads, queries), dtype=torch.float32)
    delta_kernel[(triton.cdiv(queries, 64), batch * heads)](
        d_output_BHSE,
        output_BHSE,
        delta,
        *d_output_BHSE.stride()[:3],
        *output_BHSE.stride()[:3],
        heads,
        queries,
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=padded_dim(value_dim),
        BLOCK_M=64,
    )
    return delta
