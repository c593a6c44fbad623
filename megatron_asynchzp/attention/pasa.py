# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the one entry to PASA: its modes, and block mode's place in autograd.

Mode delegate has a vendor's speed: its attention gets keys minus a mean per head. Any
flash attention computes dQ = sum_j dS_ij k_j from rounded dS, whose sum over j is not zero, and so
adds a multiple of the keys' mean to dQ. Keys without a mean leave nothing to multiply.

The fused kernels of mode block, and triton with them, are loaded if a GPU (or triton's interpreter)
can run them; otherwise block mode is the reference.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_asynchzp.attention.call import AttentionCall, AttentionOutput, Vendor
from megatron_asynchzp.attention.key_shift import (
    BLOCK_SIZE,
    ShiftedKeys,
    SnapRule,
    shift_keys,
    shift_values,
    zero_unused,
)
from megatron_asynchzp.attention.vendors import Cudnn, FlashAttn, NpuFusion, Sdpa, TransformerEngine
from megatron_asynchzp.errors import ConfigurationError, require

VENDORS: tuple[Vendor, ...] = (NpuFusion(), FlashAttn(), TransformerEngine(), Cudnn(), Sdpa())
VENDOR_NAMES = tuple(vendor.name for vendor in VENDORS)


def delegate_attention(
    call: AttentionCall, vendor: str = "auto", *, shifts_values: bool = False
) -> torch.Tensor:
    """Compute the output [B, H, S, E], in the dtype of q, by `vendor` from shifted keys.

    Padding may hold anything, inf included. With `shifts_values` v is shifted by a mean too, which
    is added to the output again, after which dQ and dK do not depend on the bias of v either; keeps
    both outputs for backward. Raises ConfigurationError if `vendor` (a name, or auto) cannot.
    """
    if shifts_values and call.dropout:
        raise ConfigurationError(
            "values are shifted only without dropout: dropped weights do not sum to one"
        )
    chosen = choose_vendor(call, vendor)
    used_BT = call.used_BT
    keys = shift_keys(call.k_BGTD, rule=SnapRule.RATIO, used_BT=used_BT).keys_BGTD
    call = replace(call, k_BGTD=keys)
    if shifts_values:
        return with_shifted_values(call, lambda shifted: _run_chunks(chosen, shifted))
    values = call.v_BGTE if used_BT is None else zero_unused(call.v_BGTE, used_BT)
    return _run_chunks(chosen, replace(call, v_BGTE=values))


def with_shifted_values(
    call: AttentionCall, attend: Callable[[AttentionCall], torch.Tensor]
) -> torch.Tensor:
    """Compute `attend(call)`, [B, H, S, E], from values without their mean."""
    shifted = shift_values(call.v_BGTE, call.used_BT)
    output = attend(replace(call, v_BGTE=shifted.values_BGTE))
    mask = call.mask
    served_BS = mask.served_queries_BS(call.device) if mask.may_leave_queries_out else None
    return shifted.restore(output, served_BS)


def _run_chunks(vendor: Vendor, call: AttentionCall) -> torch.Tensor:
    if not call.mask.chunks:
        return vendor.run(call)
    outputs = [
        vendor.run(
            replace(
                call,
                q_BHSD=call.q_BHSD[:, :, queries],
                k_BGTD=call.k_BGTD[:, :, : mask.num_keys],
                v_BGTE=call.v_BGTE[:, :, : mask.num_keys],
                mask=mask,
            )
        )
        for queries, mask in call.mask.by_chunk()
    ]
    return torch.cat(outputs, 2)


def choose_vendor(call: AttentionCall, name: str = "auto") -> Vendor:
    """Return the vendor of that name, or for auto the best one.

    That is Ascend's on Ascend, flash-attn if torch would need a mask in memory or one call per
    sequence, and torch otherwise.
    """
    if name != "auto":
        vendor = next((v for v in VENDORS if v.name == name), None)
        if vendor is None:
            raise ConfigurationError(f"{name}: no such attention; there are {VENDOR_NAMES}")
        if reason := vendor.reason_against(call):
            raise ConfigurationError(f"{name} cannot compute this attention: {reason}")
        return vendor
    by_name = {v.name: v for v in VENDORS}
    order = ["npu-fusion", "sdpa"]
    if call.mask.packed is not None or call.mask.window is not None:
        order.insert(1, "flash-attn")
    return next(by_name[n] for n in order if by_name[n].reason_against(call) is None)


MODES = ("delegate", "block")


def pasa_attention(
    call: AttentionCall, mode: str = "delegate", vendor: str = "auto", *, shifts_values=False
) -> torch.Tensor:
    """Compute the output [B, H, S, E], differentiable in q, k and v.

    Mode "delegate" has one shift per head, and `vendor` computes it (see delegate_attention). Mode
    "block" has one shift per 128 keys, by our own kernels. Raises ConfigurationError for what a
    mode cannot do.
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

    is_fused: by the kernels, or by the reference; None: by the kernels if they can run. Raises
    ConfigurationError for a call with dropout.
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
        if ctx.is_fused:
            from megatron_asynchzp.attention.triton_backward import fused_backward

            ranges = ctx.mask.key_ranges(call.device)
            grads = fused_backward(d_output, call, shifted, output, kept_BHS, ranges)
        else:
            from megatron_asynchzp.attention.reference.block import block_backward

            rest = output, kept_BHS, ctx.mask, ctx.scale
            grads = block_backward(d_output, q, shifted, v, *rest)
        return *grads, None, None, None


def _reference_forward(call: AttentionCall, shifted: ShiftedKeys):
    from megatron_asynchzp.attention.reference.block import block_forward

    done = block_forward(call.q_BHSD, shifted, call.v_BGTE, call.mask, call.scale)
    return *done.result, done.shifted_lse_BHS


def _fused_forward(call: AttentionCall, shifted: ShiftedKeys):
    from megatron_asynchzp.attention.triton_forward import LOG2_E, fused_forward

    ranges = call.mask.key_ranges(call.device)
    output, lse = fused_forward(call, shifted, ranges)
    repeats = call.q_BHSD.shape[1] // shifted.keys_BGTD.shape[1]
    frame_BH1D = shifted.frame_BG1D.repeat_interleave(repeats, 1)
    frame_BHS = call.scale * (call.q_BHSD.float() @ frame_BH1D.mT)[..., 0]
    true_lse = torch.where(lse.isposinf(), -torch.inf, lse / LOG2_E + frame_BHS)
    return output, true_lse, lse
