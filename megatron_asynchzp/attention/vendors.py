# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Calls torch's, flash-attn's, Transformer Engine's and Ascend's attention.

All but torch's are imported at their first use. Must not know that keys were shifted. Ascend's is
written from the operator's documentation (torch_npu 6.0, Atlas A2), and tested against the sources
of torch_npu 2.11 to 2.14 and, by 2.13, on an emulated NPU; it has not been run on an NPU.
"""

import importlib
import importlib.util
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences

_HALF = (torch.float16, torch.bfloat16)


class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention, which chooses among its own kernels."""

    name = "sdpa"

    def reason_against(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> torch.Tensor:
        if (packed := call.mask.packed) is not None and call.mask.allowed is None:
            return self._run_packed(call, packed)
        mask, is_rectangular = call.mask, call.mask.num_queries < call.mask.num_keys
        if mask.is_full:
            return self._attend(call, None, is_causal=False)
        if not self._is_plain_causal(mask):
            return self._run_masked(call)
        if not is_rectangular:
            return self._attend(call, None, is_causal=True)
        if call.device.type == "cpu":
            return self._run_masked(call)  # torch has no kernel for that bias there
        from torch.nn.attention.bias import causal_lower_right  # loads triton

        return self._attend(call, causal_lower_right(mask.num_queries, mask.num_keys), False)

    @staticmethod
    def _is_plain_causal(mask: AttentionMask) -> bool:
        return (
            replace(mask, is_causal=False).is_full
            and mask.num_queries <= mask.num_keys  # else the first queries see nothing
        )

    def _run_masked(self, call: AttentionCall) -> torch.Tensor:
        allowed = call.mask.allowed_BHST(call.device)
        if not call.mask.may_leave_queries_out:
            return self._attend(call, allowed, is_causal=False)
        # A row without keys would be NaN; it sees all of them instead, and is zeroed.
        is_empty = ~call.mask.served_queries_BS(call.device)[:, None, :, None]
        return self._attend(call, allowed | is_empty, False).masked_fill(is_empty, 0)

    def _run_packed(self, call: AttentionCall, packed: PackedSequences) -> torch.Tensor:
        """Attend sequence by sequence, since a mask over all would be quadratic in their sum."""
        (start_q, len_q), (start_k, len_k) = (
            [x.tolist() for x in pair] for pair in (packed.of_queries(), packed.of_keys())
        )
        if not any(nq and nk for nq, nk in zip(len_q, len_k, strict=True)):
            return self._run_masked(call)  # zeros, with gradients of zeros
        pieces, end = [], 0
        for q0, nq, k0, nk in zip(start_q, len_q, start_k, len_k, strict=True):
            pieces.append(self._zeros(call, q0 - end))
            end = q0 + nq
            if not nq or not nk:
                pieces.append(self._zeros(call, nq))
                continue
            keys = slice(k0, k0 + nk)
            piece = replace(
                call,
                q_BHSD=call.q_BHSD[:, :, q0:end],
                k_BGTD=call.k_BGTD[:, :, keys],
                v_BGTE=call.v_BGTE[:, :, keys],
                mask=AttentionMask(nq, nk, call.mask.is_causal, call.mask.window),
            )
            pieces.append(self.run(piece))
        return torch.cat([*pieces, self._zeros(call, call.mask.num_queries - end)], 2)

    @staticmethod
    def _zeros(call: AttentionCall, length: int) -> torch.Tensor:
        batch, heads = call.q_BHSD.shape[:2]
        return call.v_BGTE.new_zeros(batch, heads, length, call.v_BGTE.shape[3])

    @staticmethod
    def _attend(call: AttentionCall, mask, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            call.q_BHSD,
            call.k_BGTD,
            call.v_BGTE,
            attn_mask=mask,
            dropout_p=call.dropout,
            is_causal=is_causal,
            scale=call.scale,
            enable_gqa=call.q_BHSD.shape[1] != call.k_BGTD.shape[1],
        )


class Cudnn(Sdpa):
    """Sdpa by cuDNN's kernels if they can, by torch's choice otherwise."""

    name = "cudnn"

    def reason_against(self, call: AttentionCall) -> str | None:
        if call.device.type != "cuda":
            return "it runs on CUDA devices only"
        return None if call.q_BHSD.dtype in _HALF else "it computes fp16 and bf16 only"

    def run(self, call: AttentionCall) -> torch.Tensor:
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        with sdpa_kernel(order, set_priority=True):
            return super().run(call)


class FlashAttn:
    """The flash-attn package: packed sequences and windows without a mask in memory."""

    name = "flash-attn"

    def reason_against(self, call: AttentionCall) -> str | None:
        mask = call.mask
        if call.device.type != "cuda" or call.q_BHSD.dtype not in _HALF:
            return "it computes fp16 and bf16 on CUDA devices only"
        if mask.allowed is not None:
            return "it has no arbitrary masks"
        if mask.packed is not None and mask.packed.has_padding:
            return "it has no padding between packed sequences"
        if call.q_BHSD.shape[-1] != call.v_BGTE.shape[-1] or call.q_BHSD.shape[-1] > 256:
            return "it has equally many, and at most 256, channels in q, k and v"
        if importlib.util.find_spec("flash_attn") is None:
            return "it is not installed"
        return None

    def run(self, call: AttentionCall) -> torch.Tensor:
        flash_attn = importlib.import_module("flash_attn")
        options = {
            "dropout_p": call.dropout,
            "softmax_scale": call.scale,
            "causal": call.mask.is_causal,
            "window_size": call.mask.window or (-1, -1),
        }
        q, k, v = (x.transpose(1, 2) for x in (call.q_BHSD, call.k_BGTD, call.v_BGTE))
        if call.mask.packed is None:
            return flash_attn.flash_attn_func(q, k, v, **options).transpose(1, 2)
        packed = call.mask.packed
        output = flash_attn.flash_attn_varlen_func(
            *(x.squeeze(0) for x in (q, k, v)),
            packed.cu_seqlens_q.int(),
            packed.cu_seqlens_k.int(),
            int(packed.cu_seqlens_q.diff().max()),
            int(packed.cu_seqlens_k.diff().max()),
            **options,
        )
        return output.unsqueeze(0).transpose(1, 2)


class TransformerEngine:
    """Transformer Engine's DotProductAttention, on dense batches."""

    name = "te"

    def reason_against(self, call: AttentionCall) -> str | None:
        mask = call.mask
        if call.device.type != "cuda" or call.q_BHSD.dtype not in _HALF:
            return "it computes fp16 and bf16 on CUDA devices only"
        if mask.packed is not None or mask.has_unused_keys or mask.window is not None:
            return "it is called for full and causal masks only"
        if mask.may_leave_queries_out:
            return "it is not called where a query attends nothing"
        if importlib.util.find_spec("transformer_engine") is None:
            return "it is not installed"
        return None

    def run(self, call: AttentionCall) -> torch.Tensor:
        te = importlib.import_module("transformer_engine.pytorch")
        heads, dim = call.q_BHSD.shape[1], call.q_BHSD.shape[3]
        attention = te.DotProductAttention(
            heads,
            (dim, call.v_BGTE.shape[3]),
            num_gqa_groups=call.k_BGTD.shape[1],
            attention_dropout=call.dropout,
            qkv_format="bshd",
            attn_mask_type="causal_bottom_right" if call.mask.is_causal else "no_mask",
            softmax_scale=call.scale,
        )
        q, k, v = (x.transpose(1, 2).contiguous() for x in (call.q_BHSD, call.k_BGTD, call.v_BGTE))
        return attention(q, k, v).unflatten(-1, (heads, -1)).transpose(1, 2)


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
