# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the one entry to PASA: which mode, and block mode's place in autograd.

The fused kernels, and triton with them, are loaded if a GPU (or triton's interpreter) can run them;
otherwise block mode is the reference.
"""

import os

import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.delegate import delegate_attention, with_shifted_values
from megatron_asynchzp.attention.heads import AttentionOutput
from megatron_asynchzp.attention.key_shift import BLOCK_SIZE, ShiftedKeys, shift_keys, zero_unused
from megatron_asynchzp.errors import ConfigurationError, require

MODES = ("delegate", "block")


def pasa_attention(
    call: AttentionCall, mode: str = "delegate", vendor: str = "auto", *, shifts_values=False
) -> torch.Tensor:
    """Compute the output [B, H, S, E], differentiable in q, k and v.

    Args:
        call: the input.
        mode: "delegate": one shift per head, computed by `vendor` (see delegate_attention).
            "block": one shift per 128 keys, by our own kernels.
        vendor: for mode delegate.
        shifts_values: as in delegate_attention.

    Raises:
        ConfigurationError: the mode cannot do it.
    """
    if mode == "delegate":
        return delegate_attention(call, vendor, shifts_values=shifts_values)
    if mode != "block":
        raise ConfigurationError(f"{mode}: no such mode; there are {', '.join(MODES)}")
    if not shifts_values:
        return block_attention(call).output_BHSE
    return with_shifted_values(call, lambda shifted: block_attention(shifted).output_BHSE)


def block_attention(call: AttentionCall, *, is_fused: bool | None = None) -> AttentionOutput:
    """Compute the differentiable output and the true LSE, which is not differentiable.

    Args:
        call: the input, without dropout.
        is_fused: use the kernels or the reference; None: the kernels if they can run.

    Raises:
        ConfigurationError: the call has dropout.
    """
    if call.dropout:
        raise ConfigurationError("block mode has no attention dropout; use mode delegate")
    if is_fused is None:
        is_fused = _can_fuse(call)
    q, k, v = call.q_BHSD, call.k_BGTD, call.v_BGTE
    return AttentionOutput(*_BlockAttention.apply(q, k, v, call.mask, call.scale, is_fused))


def _can_fuse(call: AttentionCall) -> bool:
    """Return whether the kernels compute it. On a GPU the reference would need hours."""
    has_kernel = call.q_BHSD.dtype != torch.float64 and call.mask.allowed is None
    if call.device.type != "cuda":
        return has_kernel and os.environ.get("TRITON_INTERPRET") == "1"
    if call.mask.allowed is not None:
        raise ConfigurationError("block mode has no arbitrary masks; use mode delegate")
    require("triton", "--pasa-mode block on a GPU")
    return has_kernel


class _BlockAttention(torch.autograd.Function):
    """Shifts are constants here: the derivative by a shift is zero."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, is_fused):
        used_BT = mask.used_keys_BT(q.device) if mask.has_unused_keys else None
        shifted = shift_keys(k, BLOCK_SIZE, used_BT=used_BT)
        v = v if used_BT is None else zero_unused(v, used_BT)
        if is_fused:
            q, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, v))
        run = _fused_forward if is_fused else _reference_forward
        # Only the shape of `k` is read; the computation uses the shifted keys.
        output, lse, kept_BHS = run(AttentionCall(q, k, v, mask, scale), shifted)
        ctx.save_for_backward(q, v, *shifted[:3], output, kept_BHS)
        ctx.block_size, ctx.mask, ctx.scale = shifted.block_size, mask, scale
        ctx.is_fused = is_fused
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx, d_output, _):
        q, v, keys, shift, mean, output, kept_BHS = ctx.saved_tensors
        shifted = ShiftedKeys(keys, shift, mean, ctx.block_size)
        call = AttentionCall(q, keys, v, ctx.mask, ctx.scale)
        run = _fused_backward if ctx.is_fused else _reference_backward
        return *run(d_output, call, shifted, output, kept_BHS), None, None, None


def _reference_forward(call: AttentionCall, shifted: ShiftedKeys):
    from megatron_asynchzp.attention.reference.block import block_forward

    done = block_forward(call.q_BHSD, shifted, call.v_BGTE, call.mask, call.scale)
    return *done.result, done.shifted_lse_BHS


def _reference_backward(d_output, call: AttentionCall, shifted, output, lse_BHS):
    from megatron_asynchzp.attention.reference.block import block_backward

    q, v = call.q_BHSD, call.v_BGTE
    return block_backward(d_output, q, shifted, v, output, lse_BHS, call.mask, call.scale)


def _fused_forward(call: AttentionCall, shifted: ShiftedKeys):
    from megatron_asynchzp.attention.triton_forward import LOG2_E, fused_forward

    ranges = call.mask.key_ranges(call.device)
    output, lse = fused_forward(call, shifted, ranges)
    repeats = call.q_BHSD.shape[1] // shifted.keys_BGTD.shape[1]
    frame_BH1D = shifted.frame_BG1D.repeat_interleave(repeats, 1)
    frame_BHS = call.scale * (call.q_BHSD.float() @ frame_BH1D.mT)[..., 0]
    true_lse = torch.where(lse.isposinf(), -torch.inf, lse / LOG2_E + frame_BHS)
    return output, true_lse, lse


def _fused_backward(d_output, call: AttentionCall, shifted, output, lse_BHS):
    from megatron_asynchzp.attention.triton_backward import fused_backward

    ranges = call.mask.key_ranges(call.device)
    return fused_backward(d_output, call, shifted, output, lse_BHS, ranges)
