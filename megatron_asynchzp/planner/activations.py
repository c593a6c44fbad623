# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes that autograd keeps of a layer's parts for backward, per rank and micro-batch.

Derived from what autograd saves in Megatron 0.19's layers: each function names the tensors. With
LOCAL kernels, Megatron's own on a CPU, a test compares them with a count of every tensor. FUSED
kernels are Transformer Engine's with flash attention; a test compares them, except with "scores",
with a count on an emulated device, in bf16 and FP8.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_asynchzp.planner.model import (
    Attention,
    Batch,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    Parallel,
    projections,
)

_FP32, _INDEX = 4, 8


# Of two copies of a weight: NVFP4 has 4 bits, and a byte for each 16 weights.
FP8_COPIES_NBYTES, FP4_COPIES_NBYTES = 2.0, 2 * (1 / 2 + 1 / 16)


@dataclass(frozen=True)
class Kernels:
    """The kernels of an implementation, by what they keep for backward."""

    # "scores" keeps the softmax of all pairs of tokens (unfused attention), "pasa" is torch's on a
    # CPU behind PASA, "flash" keeps none of the pairs
    core: Literal["scores", "pasa", "flash"] = "flash"
    is_fused: bool = True  # norms, gates and rotary embeddings keep no intermediate
    dropout: bool = False  # whether hidden states drop out, which keeps a mask
    attention_dropout: bool = False  # the same for attention
    has_rope: bool = True
    is_softmax_fp32: bool = False
    # the weights of layers whose copies outlive the layer's call
    keeps_quantised: Literal["none", "experts", "all"] = "none"
    copies_nbytes: float = 0.0  # of two quantised copies of a number, one transposed; 0 without


LOCAL = Kernels("scores", is_fused=False)
FUSED = Kernels()


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation: what backward computes again."""

    granularity: Literal["none", "selective", "full"] = "none"  # as in --recompute-granularity
    method: Literal["uniform", "block"] = "uniform"  # of full recomputation
    num_layers: int = 1  # of full recomputation
    # of selective recomputation, as in --recompute-modules
    modules: frozenset[str] = frozenset({"core_attn"})

    def has(self, module: str) -> bool:
        return self.granularity == "selective" and module in self.modules


@dataclass(frozen=True)
class RunShape:
    """The inputs of the formulas for bytes."""

    model: Model
    parallel: Parallel
    batch: Batch
    kernels: Kernels = FUSED
    recompute: Recompute = Recompute()

    @property
    def tokens(self) -> float:
        return self.batch.tokens / self.parallel.cp

    @property
    def outside(self) -> float:
        """The same where sequence parallelism divides them."""
        return self.tokens / (self.parallel.tp if self.parallel.sequence_parallel else 1)

    @property
    def pairs(self) -> float:
        return self.tokens * self.batch.seq_length

    @property
    def quantised_nbytes(self) -> float:
        """Bytes of two quantised copies of a number that projections multiply; 0 with adapters."""
        return self.kernels.copies_nbytes if self.model.adapters is None else 0.0

    @property
    def input_nbytes(self) -> float:
        """Bytes that a projection keeps of each number of its input: of its transposed copy."""
        return self.quantised_nbytes / 2 or self.model.itemsize

    @property
    def mask_itemsize(self) -> int:
        """Bytes per element that dropout keeps: 1, or on a CPU a factor in the model's dtype."""
        return 1 if self.kernels.is_fused else self.model.itemsize

    @property
    def hidden_nbytes(self) -> float:
        return self.outside * self.model.hidden * self.model.itemsize


def norm_nbytes(width: float, tokens: float, setting: RunShape) -> float:
    """Return a norm's bytes without its output, which the next projection keeps."""
    # torch's RMSNorm computes in fp32 and keeps its input and, for its weight's gradient, the
    # normalized input; LayerNorm keeps its input and two numbers a token.
    if setting.model.norm_numel == 1 and not setting.kernels.is_fused:
        copies = 2 if setting.model.itemsize != _FP32 else 1
        copies -= setting.model.adapters is not None
        kept_input = setting.model.itemsize if setting.model.itemsize == _FP32 else 0
        return tokens * (width * (copies * _FP32 + kept_input) + _FP32)
    return tokens * (
        width * setting.model.itemsize + setting.model.norm_numel * setting.model.itemsize
    )


def _rope_nbytes(rotated: float, setting: RunShape) -> float:
    if not setting.kernels.has_rope or setting.kernels.is_fused:
        return 0.0
    return 4 * setting.batch.seq_length * rotated * setting.model.itemsize


# ---- attention


def _core_nbytes(
    heads: float, queries: float, values: float, kept: float, setting: RunShape
) -> float:
    """Return the bytes that core attention keeps.

    queries, values: channels of all heads of a rank; kept: channels of queries, keys and values as
    projected, some kept by the core as they are.
    """
    token_nbytes = setting.tokens * setting.model.itemsize
    match setting.kernels.core:
        case "flash":
            # Queries, keys, values; the output is what the next projection keeps.
            return token_nbytes * kept + _FP32 * setting.tokens * heads
        case "pasa" if queries != values:  # torch computes such heads in fp32, with all pairs
            return _FP32 * (setting.tokens * (2 * queries + values) + setting.pairs * heads)
        case "pasa":  # rotated queries, shifted keys, values as projected
            channels = kept + queries * (1 + setting.kernels.has_rope)
            return token_nbytes * channels + _FP32 * setting.tokens * heads
        case _:
            return token_nbytes * kept + _scores_nbytes(heads, setting)


def _scores_nbytes(heads: float, setting: RunShape) -> float:
    """Return the bytes of the softmax, dropped and masked."""
    # The product with the values keeps it again if its dtype differs.
    size, per_pair = setting.model.itemsize, float(setting.model.itemsize)
    if setting.kernels.is_softmax_fp32 and size != _FP32:
        per_pair += _FP32
    if setting.kernels.attention_dropout:
        per_pair += size + setting.mask_itemsize
    return setting.pairs * heads * per_pair + setting.batch.seq_length**2


def _attention_nbytes(part: Attention, setting: RunShape) -> float:
    tp, size = setting.parallel.tp, setting.model.itemsize
    width = part.num_heads * part.head_dim / tp
    kv = part.num_groups * part.head_dim / tp
    mixed = width + 2 * kv
    heads = part.num_heads / tp
    is_grouped = part.num_groups != part.num_heads
    match setting.kernels.core:
        case "scores" if is_grouped:  # keys and values repeated for every head
            kept = 3 * width
        case "scores":  # values are a part of the projection's output, which stays whole
            kept = mixed + (2 * width if setting.kernels.has_rope else 0)
        case _:
            kept = mixed
    inputs = setting.outside * setting.model.hidden + setting.tokens * width
    nbytes = inputs * setting.input_nbytes  # the projections'
    if setting.recompute.has("core_attn"):
        rotates_alone = setting.kernels.has_rope and not setting.kernels.is_fused
        nbytes += setting.tokens * (mixed + (width + kv) * rotates_alone) * size
    else:
        nbytes += _core_nbytes(heads, width, width, kept, setting)
    if part.has_qk_norm:
        nbytes += norm_nbytes(width + kv, setting.tokens, setting)
    return nbytes + _rope_nbytes(part.head_dim, setting)


def _latent_nbytes(part: LatentAttention, setting: RunShape) -> float:
    tp, size = setting.parallel.tp, setting.model.itemsize
    heads = part.num_heads / tp
    queries, values = heads * (part.qk_dim + part.rope_dim), heads * part.v_dim
    compressed = part.q_rank + part.kv_rank + part.rope_dim
    nbytes = setting.outside * setting.model.hidden * size  # the first projections
    nbytes += setting.tokens * (compressed + values) * size  # the second ones and the last
    if part.has_qk_norm:
        nbytes += norm_nbytes(part.q_rank + part.kv_rank, setting.tokens, setting)
    kept = 2 * queries + values
    if setting.recompute.has("mla_up_proj"):
        kept = 0.0
    if setting.recompute.has("core_attn"):
        nbytes += setting.tokens * kept * size
    else:
        nbytes += _core_nbytes(heads, queries, values, kept, setting)
    return nbytes + _rope_nbytes(part.rope_dim, setting)


def _mamba_nbytes(part: Mamba, setting: RunShape) -> float:
    """Return the bytes of projections' inputs and first output, and of the convolution's output."""
    # The fused scan computes the rest again.
    tp, size = setting.parallel.tp, setting.model.itemsize
    inner = part.num_heads * part.head_dim / tp
    states = 2 * part.num_groups * part.state_dim / tp
    made = 2 * inner + states + part.num_heads / tp
    return setting.outside * setting.model.hidden * size + setting.tokens * size * (
        made + (inner + states) + 2 * inner
    )


# ---- MLP


def _activation_nbytes(
    rows: float, ffn: float, is_gated: bool, is_weighted: bool, setting: RunShape
):
    """Return bytes between two projections of `rows` tokens; is_weighted: by a router."""
    # Gated, with LOCAL kernels: both halves, the activation of the first, a copy of the second, and
    # their product. Without a gate: the first projection's output and its activation.
    if setting.kernels.is_fused:
        kept = 2.0 + 1.0 if is_gated else 2.0
    else:
        kept = (5.0 if is_gated else 2.0) + is_weighted
    if is_weighted and setting.recompute.has("moe_act"):
        kept = 2.0 if is_gated else 1.0
    return rows * ffn * kept * setting.model.itemsize


def _mlp_nbytes(part: Mlp, setting: RunShape) -> float:
    own, ffn = setting.outside * setting.model.hidden, part.ffn / setting.parallel.tp
    if setting.recompute.has("mlp"):
        return own * setting.model.itemsize
    less = setting.model.itemsize - setting.input_nbytes  # of the second projection's input
    made = _activation_nbytes(setting.tokens, ffn, part.is_gated, False, setting)
    return own * setting.input_nbytes + made - setting.tokens * ffn * less


def _experts_nbytes(part: Experts, setting: RunShape) -> float:
    size, hidden = setting.model.itemsize, setting.model.hidden
    own = setting.outside * hidden * size
    if setting.recompute.has("moe"):
        return own
    routed = setting.outside * part.topk
    if setting.parallel.experts_tp > 1:
        routed *= setting.parallel.experts_tp
    # The router's logits and weights in fp32, where each token goes and comes from.
    router = setting.outside * (
        part.num_experts * _FP32 * setting.kernels.is_fused + 4 * part.topk * _INDEX
    )
    inputs = routed * hidden * size
    if setting.parallel.ep > 1:  # before and after the exchange, and on the way back
        inputs *= 2
    ffn = part.ffn / setting.parallel.experts_tp
    nbytes = own + router + inputs + _activation_nbytes(routed, ffn, part.is_gated, True, setting)
    if part.shared_ffn and not setting.recompute.has("shared_experts"):
        shared = part.shared_ffn / setting.parallel.tp
        nbytes += _activation_nbytes(setting.tokens, shared, part.is_gated, False, setting)
    return nbytes


# ---- adapters


def _adapters_nbytes(layer: Layer, setting: RunShape) -> float:
    """Return the bytes that a layer of frozen projections keeps more, or less."""
    # An adapter keeps its projection's input and the product of its first matrix; a projection
    # without an adapter keeps nothing.
    adapters, parallel = setting.model.adapters, setting.parallel
    if adapters is None or not isinstance(layer.mixer, Attention) or not isinstance(layer.mlp, Mlp):
        return 0.0
    more = 0.0
    for name, (inputs, _) in projections(layer.mixer, layer.mlp, setting.model).items():
        is_recomputed = name == "linear_fc2" and setting.recompute.has("mlp")
        if name in adapters.layers:
            more += setting.tokens * adapters.rank * (not is_recomputed)
        elif name in ("linear_qkv", "linear_fc1"):
            more -= setting.outside * inputs
        elif not is_recomputed:
            more -= setting.tokens * inputs / parallel.tp
    return more * setting.model.itemsize


# ---- a layer


def layer_nbytes(layer: Layer, setting: RunShape) -> float:
    """Return what a layer keeps for backward unless recomputed whole; its input if a norm does."""
    nbytes = 0.0
    norms = sum(part is not None for part in (layer.mixer, layer.mlp))
    norm = norm_nbytes(setting.model.hidden, setting.outside, setting)
    if setting.recompute.has("layernorm"):  # its output is computed again, its input stays
        norm -= setting.hidden_nbytes
    nbytes += norms * norm
    if setting.kernels.dropout:  # a mask for each addition to the hidden states
        nbytes += norms * setting.outside * setting.model.hidden * setting.mask_itemsize
    match layer.mixer:
        case Attention():
            nbytes += _attention_nbytes(layer.mixer, setting)
        case LatentAttention():
            nbytes += _latent_nbytes(layer.mixer, setting)
        case Mamba():
            nbytes += _mamba_nbytes(layer.mixer, setting)
    match layer.mlp:
        case Mlp():
            nbytes += _mlp_nbytes(layer.mlp, setting)
        case Experts():
            nbytes += _experts_nbytes(layer.mlp, setting)
    return nbytes + _adapters_nbytes(layer, setting)


def gradient_nbytes(layer: Layer, setting: RunShape) -> float:
    """Return the most bytes of activations' gradients that live at once in a layer's backward."""
    # They are those between the projections of its MLP, with quantised copies, or of the pairs of
    # its core attention. With an adapter the second projection's input has two, until they are
    # added.
    size, ffn, rows = setting.model.itemsize, 0.0, setting.tokens
    adapters = setting.model.adapters
    match layer.mlp:
        case Mlp():
            twice = adapters is not None and "linear_fc2" in adapters.layers
            ffn = layer.mlp.ffn / setting.parallel.tp * (1 + layer.mlp.is_gated + twice)
            size += setting.quantised_nbytes
        case Experts():
            ffn = layer.mlp.ffn / setting.parallel.experts_tp * (1 + layer.mlp.is_gated)
            rows = setting.outside * layer.mlp.topk * setting.parallel.experts_tp
    return rows * ffn * size + 2 * setting.hidden_nbytes


def loss_nbytes(setting: RunShape) -> float:
    """Return the most bytes of logits: with an fp32 copy, in which their gradient is made."""
    per_logit = _FP32 + (setting.model.itemsize if setting.model.itemsize != _FP32 else 0)
    return setting.tokens * setting.model.vocabulary / setting.parallel.tp * per_logit


def final_norm_nbytes(setting: RunShape) -> float:
    return norm_nbytes(setting.model.hidden, setting.outside, setting) + setting.hidden_nbytes


def buffer_nbytes(layer: Layer, setting: RunShape) -> float:
    """Return the bytes of the buffer for scores that all layers share in Megatron's attention."""
    if not isinstance(layer.mixer, (Attention, LatentAttention)):
        return 0.0
    return setting.pairs * layer.mixer.num_heads / setting.parallel.tp * setting.model.itemsize
