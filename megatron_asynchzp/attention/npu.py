# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Calls Ascend's `npu_fusion_attention`: its layouts, masks and numbers.

Must not know that keys were shifted. torch_npu is imported at its first use. Written from the
operator's documentation (torch_npu 6.0, Atlas A2), and tested against the sources of torch_npu 2.11
to 2.14 and, by 2.13, on an emulated NPU; it has not been run on an NPU.
"""

import importlib
import importlib.util

import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask

_SPARSE_DEFAULT, _SPARSE_CAUSAL_LOWER_RIGHT, _SPARSE_BAND = 0, 3, 4
_UNLIMITED = 2147483647
_COMPRESSED = 2048  # side of the triangle that stands for any causal or banded mask
# 0 and 1 are reserved; 2 computes rows that attend nothing, which otherwise lose accuracy.
_INNER_PRECISE, _INNER_PRECISE_EMPTY_ROWS = 0, 2
# The operator's documented limits.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEADS, _MOST_CHANNELS, _MOST_SEQUENCES = 256, 768, 1024


class NpuFusion:
    """torch_npu.npu_fusion_attention with autograd of its own."""

    name = "npu-fusion"

    def reason_against(self, call: AttentionCall) -> str | None:
        if call.device.type != "npu":
            return "it runs on Ascend NPUs only"
        if call.q_BHSD.dtype not in _DTYPES:
            return "it computes fp16, bf16 and fp32 only"
        if call.q_BHSD.shape[1] > _MOST_HEADS:
            return f"it has at most {_MOST_HEADS} heads"
        if max(call.q_BHSD.shape[-1], call.v_BGTE.shape[-1]) > _MOST_CHANNELS:
            return f"it has at most {_MOST_CHANNELS} channels in a head"
        if call.mask.packed is not None and (
            call.mask.packed.cu_seqlens_q.numel() - 1 > _MOST_SEQUENCES
        ):
            return f"its TND layout has at most {_MOST_SEQUENCES} packed sequences"
        if call.mask.packed is not None and call.mask.packed.has_padding:
            return "its TND layout has no padding between packed sequences"
        if call.mask.packed is not None and not call.mask.served_queries_BS("cpu").all():
            return "its TND layout has no queries that attend nothing"
        if call.q_BHSD.shape[-1] != call.v_BGTE.shape[-1]:
            return "it is called with equally many channels in q, k and v only"
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        return None

    def run(self, call: AttentionCall) -> torch.Tensor:
        operator = importlib.import_module("torch_npu").npu_fusion_attention
        q, k, v = call.q_BHSD, call.k_BGTD, call.v_BGTE
        options = fusion_options(call)
        if call.mask.packed is not None:
            q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (q, k, v))
            output = operator(q, k, v, call.q_BHSD.shape[1], "TND", **options)[0]
            return output.transpose(0, 1).unsqueeze(0)
        output = operator(q, k, v, call.q_BHSD.shape[1], "BNSD", **options)[0]
        if call.mask.may_leave_queries_out:
            served_BS = call.mask.served_queries_BS(call.device)
            output = output.masked_fill(~served_BS[:, None, :, None], 0)
        return output


def fusion_options(call: AttentionCall) -> dict:
    """Return the keyword arguments for `call`; True in atten_mask hides a key."""
    mask = call.mask
    options = {
        "scale": call.scale,
        "keep_prob": 1.0 - call.dropout,
        "inner_precise": _INNER_PRECISE,
        **_mask_options(mask, call.device),
    }
    if mask.packed is None:
        if mask.may_leave_queries_out:
            options["inner_precise"] = _INNER_PRECISE_EMPTY_ROWS
    else:  # ends of the sequences, without the leading zero
        options["actual_seq_qlen"] = mask.packed.cu_seqlens_q[1:].tolist()
        options["actual_seq_kvlen"] = mask.packed.cu_seqlens_k[1:].tolist()
    return options


def _mask_options(mask: AttentionMask, device: torch.device) -> dict:
    left, right = mask.left_and_right
    if mask.allowed is not None:
        return {"atten_mask": ~mask.allowed_BHST(device), "sparse_mode": _SPARSE_DEFAULT}
    if (left, right) == (-1, -1):
        return {"sparse_mode": _SPARSE_DEFAULT}
    triangle = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)
    if (left, right) == (-1, 0):
        return {"atten_mask": triangle, "sparse_mode": _SPARSE_CAUSAL_LOWER_RIGHT}
    return {
        "atten_mask": triangle,
        "sparse_mode": _SPARSE_BAND,
        "pre_tockens": _UNLIMITED if left < 0 else left,
        "next_tockens": _UNLIMITED if right < 0 else right,
    }
