# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""PASA at a vendor's speed: keys minus a mean per head, given to the best vendor's attention.

Any flash attention computes dQ = sum_j dS_ij k_j from rounded dS, whose sum over j is not zero,
and so adds a multiple of the keys' mean to dQ. Keys without a mean leave nothing to multiply.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_asynchzp.attention.call import AttentionCall, Vendor
from megatron_asynchzp.attention.key_shift import SnapRule, shift_keys, shift_values, zero_unused
from megatron_asynchzp.attention.npu import NpuFusion
from megatron_asynchzp.attention.vendors import Cudnn, FlashAttn, Sdpa, TransformerEngine
from megatron_asynchzp.errors import ConfigurationError

VENDORS: tuple[Vendor, ...] = (NpuFusion(), FlashAttn(), TransformerEngine(), Cudnn(), Sdpa())
VENDOR_NAMES = tuple(vendor.name for vendor in VENDORS)


def delegate_attention(
    call: AttentionCall, vendor: str = "auto", *, shifts_values: bool = False
) -> torch.Tensor:
    """Compute the output [B, H, S, E], in the dtype of q, by `vendor` from shifted keys.

    Padding may hold anything, inf included.

    Args:
        call: the input.
        vendor: one of VENDOR_NAMES, or auto.
        shifts_values: shift v by a mean too and add it to the output again, after which dQ and dK
            do not depend on the bias of v either. Keeps both outputs for backward.

    Raises:
        ConfigurationError: no vendor can compute it.
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
