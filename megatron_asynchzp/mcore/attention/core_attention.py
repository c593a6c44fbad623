# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""PASA as a core attention of Megatron: its contract, masks, layouts and context parallelism."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import pasa_attention
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags.pasa import PasaOptions

# Megatron's own attentions, whose place PASA may take. Others compute something else.
_REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


def use_pasa_in(spec: Any, options: PasaOptions) -> Any:
    """Return the spec of a module with PASA as its core attention; any other spec as it is.

    Megatron's builder passes every module's spec, so all kinds of layers get it alike. Raises
    ConfigurationError for a core attention that is neither Megatron's own nor ours.
    """
    submodules = getattr(spec, "submodules", None)
    if submodules is None or not is_dataclass(type(submodules)):
        return spec
    core = getattr(submodules, "core_attention", None)
    if core is None:
        return spec
    module = core.module if isinstance(core, ModuleSpec) else core
    name = getattr(module, "__name__", str(module))
    if name not in (*_REPLACEABLE, PasaAttention.__name__):
        raise ConfigurationError(
            f"--use-pasa-attention cannot take the place of {name}, which computes something "
            "else than softmax attention; drop the flag"
        )
    ours = ModuleSpec(module=PasaAttention, params={"options": options})
    return replace(spec, submodules=replace(submodules, core_attention=ours))


class PasaAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v from shifted keys.

    Inputs are sbhd, [s, b, heads, channels], or thd, [t, heads, channels] with PackedSeqParams; k
    and v have one head per query group. The output is [s, b, heads x v channels], or [t, heads x v
    channels]. Dropout uses Megatron's tensor-parallel random state.

    With context parallelism a rank holds an early and a late chunk of every sequence: keys and
    values are gathered, ordered and shifted once; each chunk attends to the keys before it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        options: PasaOptions = PasaOptions(),
    ):
        super().__init__(config=config)
        del attention_type, v_channels, cp_comm_type  # the tensors show it; keys are gathered
        if config.softmax_type != "vanilla":
            raise ConfigurationError(
                f"--softmax-type {config.softmax_type} is not supported with --use-pasa-attention"
            )
        self.options = options
        self.attn_mask_type = attn_mask_type
        # Query-key layer scaling divides scores by the layer number and multiplies them by it
        # again in the softmax, against overflow in fp16; scores are fp32 here.
        self.softmax_scale = softmax_scale or 1.0 / sqrt(k_channels or config.kv_channels)  # pyright: ignore[reportArgumentType]
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        has_window = is_layer_window_attention(
            config.window_size,
            config.window_attn_skip_freq,  # pyright: ignore[reportArgumentType]
            max(1, layer_number),
        )
        window = config.window_size if has_window else None
        self.window = None if window is None else (window[0], window[1])
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        mask_type = attn_mask_type or self.attn_mask_type
        packed, cp_group = packed_seq_params, self.cp_group
        if packed is not None and packed.qkv_format != "thd":
            packed = None
        if packed is not None and packed.local_cp_size is not None:  # --hybrid-context-parallel
            cp_group = packed.cp_group
        raise_first(self._faults(mask_type, attention_bias, packed, cp_group))
        if packed is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))  # batch of one
        if cp_group is not None:
            key, value = (_gather(x, cp_group) for x in (key, value))
            mask = self._chunked_mask(query, key, mask_type, cp_group)
        elif packed is not None:
            mask = self._packed_mask(query, key, mask_type, packed)
        else:
            mask = self._mask(query, key, mask_type, attention_mask)
        output = self._attend(query, key, value, mask)
        return output if packed is None else output.squeeze(1)

    def _faults(
        self,
        mask_type: AttnMaskType,
        bias: torch.Tensor | None,
        packed: PackedSeqParams | None,
        cp_group: dist.ProcessGroup | None,
    ) -> Iterator[str]:
        if bias is not None:
            yield "--use-pasa-attention does not support an attention bias; drop the flag"
        if cp_group is None:
            return
        if packed is not None and (packed.local_cp_size is None or len(packed.cu_seqlens_q) > 2):
            yield (
                "packed sequences with --context-parallel-size above 1 are not supported with "
                "--use-pasa-attention; use one of the two"
            )
        if mask_type in (AttnMaskType.padding, AttnMaskType.arbitrary, AttnMaskType.padding_causal):
            yield (
                f"an attention mask ({mask_type.name}) with --context-parallel-size above 1 is "
                "not supported with --use-pasa-attention; use causal attention"
            )
        if mask_type not in _CAUSAL and self.window is not None:
            yield (
                "a window that is not causal is not supported with --use-pasa-attention and "
                "--context-parallel-size above 1"
            )

    def _attend(self, query, key, value, mask: AttentionMask) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        q_BHSD, k_BGTD, v_BGTE = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        call = AttentionCall(q_BHSD, k_BGTD, v_BGTE, mask, self.softmax_scale, dropout)
        is_forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_forked else nullcontext():  # pyright: ignore[reportOptionalMemberAccess]
            output_BHSE = pasa_attention(
                call,
                self.options.mode,
                self.options.vendor,
                shifts_values=self.options.shifts_values,
            )
        return output_BHSE.permute(2, 0, 1, 3).flatten(2)

    def _mask(
        self, query, key, mask_type: AttnMaskType, attention_mask: torch.Tensor | None
    ) -> AttentionMask:
        """Megatron's masks are True where a key is hidden."""
        is_causal = mask_type in _CAUSAL
        is_used = mask_type is not AttnMaskType.no_mask
        if mask_type is AttnMaskType.causal and not self.options.uses_causal_mask:
            is_used = False
        allowed = None
        if attention_mask is not None and is_used:
            shape = (-1, -1, query.shape[0], key.shape[0])
            allowed = ~attention_mask.expand(*shape)
        return AttentionMask(query.shape[0], key.shape[0], is_causal, self.window, allowed=allowed)

    def _packed_mask(self, query, key, mask_type, params: PackedSeqParams) -> AttentionMask:
        starts, lengths = [], []
        for real, padded in (
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        ):
            starts.append(real if padded is None else padded)
            lengths.append(None if padded is None else real.diff())
        packed = PackedSequences(*starts, *lengths)
        return AttentionMask(
            query.shape[0], key.shape[0], mask_type in _CAUSAL, self.window, packed=packed
        )

    def _chunked_mask(
        self, query, key, mask_type: AttnMaskType, cp_group: dist.ProcessGroup
    ) -> AttentionMask:
        is_causal, rank = mask_type in _CAUSAL, cp_group.rank()
        half = query.shape[0] // 2
        ends = (rank + 1) * half, (2 * cp_group.size() - rank) * half
        chunks = tuple((half, end) for end in ends) if is_causal else ()
        return AttentionMask(query.shape[0], key.shape[0], is_causal, self.window, chunks=chunks)


def _gather(x_sbhd: torch.Tensor, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return keys or values of the whole sequence, in order. Backward sums and scatters."""
    ranks = cp_group.size()
    whole = tensor_parallel.gather_from_sequence_parallel_region(x_sbhd, group=cp_group)
    chunks = whole.chunk(2 * ranks)  # rank r holds chunks r and 2 ranks - 1 - r
    early, late = chunks[0::2], chunks[1::2]
    return torch.cat([*early, *reversed(late)])
