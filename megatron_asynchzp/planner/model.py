# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a model as plain numbers: its layers, their parameters on one rank, and the forward FLOPs of
one micro-batch. Must not import Megatron or torch.distributed.

Every count is of one rank: after tensor, pipeline, context and expert parallelism, before the
sharding over data-parallel ranks.
"""

from dataclasses import dataclass, field
from typing import Literal

GroupKey = Literal["dense", "expert"]


@dataclass(frozen=True)
class Attention:
    """Multi-head or grouped-query attention. head_dim: of queries, keys and values."""

    num_heads: int
    num_groups: int
    head_dim: int
    has_qk_norm: bool = False
    has_qkv_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention. q_rank, kv_rank: of the compressed queries (0: not compressed), and
    of the compressed keys and values; qk_dim, rope_dim, v_dim: of one head."""

    num_heads: int
    q_rank: int
    kv_rank: int
    qk_dim: int
    rope_dim: int
    v_dim: int
    has_qk_norm: bool = False


@dataclass(frozen=True)
class Mamba:
    """A Mamba 2 mixer. kernel: width of its convolution."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int = 4


@dataclass(frozen=True)
class Mlp:
    """ffn: the width between its two projections; is_gated: SwiGLU and its kin."""

    ffn: int
    is_gated: bool


@dataclass(frozen=True)
class Experts:
    """A mixture of experts. ffn: of one expert; shared_ffn: of the shared experts, 0 without;
    has_router_bias: a bias that is learned, not the one of load balancing; per_unit: how many of a
    rank's experts form a unit, 0 where all stay together."""

    num_experts: int
    topk: int
    ffn: int
    is_gated: bool
    shared_ffn: int = 0
    has_shared_gate: bool = False
    has_router_bias: bool = False
    per_unit: int = 0


@dataclass(frozen=True)
class Layer:
    """One layer: a mixer, then an MLP; a hybrid model's layers have one of the two."""

    mixer: Attention | LatentAttention | Mamba | None
    mlp: Mlp | Experts | None


@dataclass(frozen=True)
class Model:
    """A language model.

    vocabulary: padded; layers: of the decoder, all pipeline stages; mtp: the layer inside each
    multi-token-prediction module; is_tied: embedding and output share one weight; has_bias: of
    every projection; norm_numel: per hidden element, 2 for LayerNorm and 1 for RMSNorm;
    num_positions: of learned position embeddings, 0 without; itemsize: bytes of a parameter and of
    an activation.
    """

    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...] = ()
    is_tied: bool = True
    has_bias: bool = False
    norm_numel: int = 1
    num_positions: int = 0
    itemsize: int = 2


@dataclass(frozen=True)
class Parallel:
    """Megatron's parallel sizes. virtual: model chunks on each rank; expert_tp: None for tp;
    stage_layers: decoder layers of each chunk in the order of the model (stage 0 to pp - 1 of chunk
    0, then of chunk 1), None for equal shares."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    virtual: int = 1
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] | None = None

    @property
    def experts_tp(self) -> int:
        return self.tp if self.expert_tp is None else self.expert_tp


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a data-parallel replica, `size` sequences of `seq_length` tokens; and how
    many of them a step has."""

    size: int
    seq_length: int
    num_micro_batches: int = 1

    @property
    def tokens(self) -> int:
        return self.size * self.seq_length


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered, used and released together, and what they compute.

    kind: what holds them ("experts" are units beside their layer where expert parallelism divides
    them, and where they are used group by group); chunk: of the rank's model chunks; numel:
    parameters on this rank; flops: forward, of one micro-batch on this rank (the backward pass
    takes twice as many, recomputation once more); source: the layer, None for the rest.
    """

    name: str
    kind: Literal["embedding", "layer", "experts", "mtp", "output", "root"]
    numel: int
    flops: float = 0.0
    group: GroupKey = "dense"
    chunk: int = 0
    source: Layer | None = field(default=None, repr=False)

    @property
    def layer(self) -> str:
        """The name of the unit that it is needed together with; "" for what is around all."""
        return "" if self.kind == "root" else self.name.partition(".experts")[0]

    @property
    def part(self) -> str:
        """Of a layer's experts, which of the groups that are used one after another; "" for what
        is used throughout."""
        return self.name.partition(".experts")[2]


# ---- parameters


def _linear(inputs: float, outputs: float, has_bias: bool, bias_parts: int = 1) -> float:
    """A weight, and a bias of which a rank has one of `bias_parts`. One size is a rank's share."""
    return inputs * outputs + has_bias * outputs / bias_parts


def _attention_numel(of: Attention, model: Model, tp: int) -> float:
    width = of.num_heads * of.head_dim / tp
    # With fewer groups than ranks, Megatron gives every rank one group's share of the projection.
    kv = of.num_groups * of.head_dim / tp
    has_bias = model.has_bias or of.has_qkv_bias
    qkv = _linear(model.hidden, width + 2 * kv, has_bias)
    qk_norm = 2 * model.norm_numel * of.head_dim if of.has_qk_norm else 0
    return qkv + _linear(width, model.hidden, model.has_bias) + qk_norm


def _latent_numel(of: LatentAttention, model: Model, tp: int) -> float:
    """Its projections to the ranks are without bias; Megatron's local layers split them too."""
    heads = of.num_heads / tp
    queries = heads * (of.qk_dim + of.rope_dim)
    numel = _linear(of.q_rank or model.hidden, queries, False)
    if of.q_rank:
        numel += model.hidden * of.q_rank / tp
    numel += model.hidden * (of.kv_rank + of.rope_dim) / tp
    numel += of.kv_rank * heads * (of.qk_dim + of.v_dim)
    if of.has_qk_norm:
        numel += model.norm_numel * (of.q_rank + of.kv_rank)
    return numel + _linear(heads * of.v_dim, model.hidden, model.has_bias)


def _mamba_numel(of: Mamba, model: Model, tp: int) -> float:
    inner = of.num_heads * of.head_dim / tp
    convolved = inner + 2 * of.num_groups * of.state_dim / tp
    heads = of.num_heads / tp
    project_in = model.hidden * (inner + convolved + heads)
    convolution = convolved * (of.kernel + 1)
    # Per head: A, D and the bias of the time step. The gated norm has one weight an element.
    return project_in + convolution + 3 * heads + inner + inner * model.hidden


def _mlp_numel(ffn: float, is_gated: bool, model: Model, has_bias: bool | None = None) -> float:
    """ffn: of this rank."""
    has_bias = model.has_bias if has_bias is None else has_bias
    return _linear(model.hidden, ffn * (1 + is_gated), has_bias) + _linear(
        ffn, model.hidden, has_bias
    )


def _shared_numel(of: Experts, model: Model, tp: int) -> float:
    """What a layer of experts has besides them: the router and the shared experts."""
    numel = of.num_experts * (model.hidden + of.has_router_bias)
    if of.shared_ffn:
        numel += _mlp_numel(of.shared_ffn / tp, of.is_gated, model, has_bias=False)
        numel += model.hidden * of.has_shared_gate
    return numel


def layer_numel(layer: Layer, model: Model, parallel: Parallel) -> int:
    """Of one layer on a rank, without its experts."""
    tp, numel = parallel.tp, 0.0
    for part in (layer.mixer, layer.mlp):
        numel += model.norm_numel * model.hidden * (part is not None)
    match layer.mixer:
        case Attention():
            numel += _attention_numel(layer.mixer, model, tp)
        case LatentAttention():
            numel += _latent_numel(layer.mixer, model, tp)
        case Mamba():
            numel += _mamba_numel(layer.mixer, model, tp)
    match layer.mlp:
        case Mlp():
            numel += _mlp_numel(layer.mlp.ffn / tp, layer.mlp.is_gated, model)
        case Experts():
            numel += _shared_numel(layer.mlp, model, tp)
    return round(numel)


def experts_numel(of: Experts, model: Model, parallel: Parallel) -> int:
    """Of the experts of one layer that a rank holds."""
    one = _mlp_numel(of.ffn / parallel.experts_tp, of.is_gated, model)
    return round(of.num_experts / parallel.ep * one)


def num_expert_groups(of: Experts, parallel: Parallel) -> int:
    """Units of the experts of one layer on a rank."""
    return of.num_experts // (parallel.ep * of.per_unit) if of.per_unit else 1


# ---- FLOPs


def mixer_flops(layer: Layer, model: Model, parallel: Parallel, batch: Batch) -> float:
    """Forward FLOPs of attention or Mamba; causal attention counts half of its scores."""
    tokens, tp, of = batch.tokens / parallel.cp, parallel.tp, layer.mixer
    pairs = tokens * batch.seq_length / 2
    match of:
        case Attention():
            weights = _attention_numel(of, model, tp)
            return 2 * tokens * weights + 4 * pairs * of.num_heads * of.head_dim / tp
        case LatentAttention():
            weights = _latent_numel(of, model, tp)
            per_pair = of.num_heads * (of.qk_dim + of.rope_dim + of.v_dim) / tp
            return 2 * tokens * weights + 2 * pairs * per_pair
        case Mamba():
            inner = of.num_heads * of.head_dim / tp
            return 2 * tokens * _mamba_numel(of, model, tp) + 6 * tokens * inner * of.state_dim
        case None:
            return 0.0


def expert_flops(of: Experts, model: Model, parallel: Parallel, batch: Batch) -> float:
    """Forward FLOPs of routed experts on a rank, where the router balances them."""
    one = _mlp_numel(of.ffn / parallel.experts_tp, of.is_gated, model)
    # Expert parallelism moves tokens between replicas: on average each rank computes as many.
    tokens = batch.tokens / parallel.cp * parallel.experts_tp / parallel.tp
    return 2 * tokens * of.topk * one


def layer_flops(layer: Layer, model: Model, parallel: Parallel, batch: Batch) -> float:
    """Forward FLOPs of one layer on a rank, without its routed experts."""
    tokens, flops = batch.tokens / parallel.cp, mixer_flops(layer, model, parallel, batch)
    match layer.mlp:
        case Mlp():
            flops += 2 * tokens * _mlp_numel(layer.mlp.ffn / parallel.tp, layer.mlp.is_gated, model)
        case Experts():
            flops += 2 * tokens * _shared_numel(layer.mlp, model, parallel.tp)
    return flops


def output_flops(model: Model, parallel: Parallel, batch: Batch) -> float:
    """Forward FLOPs of the logits on a rank."""
    return 2 * batch.tokens / parallel.cp * model.hidden * model.vocabulary / parallel.tp


# ---- units


def chunk_layers(model: Model, parallel: Parallel, stage: int) -> tuple[tuple[Layer, ...], ...]:
    """The decoder layers of each model chunk of a pipeline stage. Raises ValueError where layers
    cannot be shared out."""
    parts = parallel.pp * parallel.virtual
    counts = parallel.stage_layers
    if counts is None:
        if len(model.layers) % parts:
            raise ValueError(f"{len(model.layers)} layers on {parts} model chunks")
        counts = (len(model.layers) // parts,) * parts
    if len(counts) != parts or sum(counts) != len(model.layers):
        raise ValueError(f"{counts} are not {len(model.layers)} layers on {parts} model chunks")
    starts = [sum(counts[:part]) for part in range(parts)]
    chosen = [chunk * parallel.pp + stage for chunk in range(parallel.virtual)]
    return tuple(model.layers[starts[part] : starts[part] + counts[part]] for part in chosen)


def _layer_units(
    name: str, chunk: int, layer: Layer, model: Model, parallel: Parallel, batch: Batch
) -> list[Unit]:
    kind = "mtp" if name.startswith("mtp") else "layer"
    numel = layer_numel(layer, model, parallel)
    flops = layer_flops(layer, model, parallel, batch)
    extra = 0
    if kind == "mtp":  # three norms, and the projection of hidden states beside embeddings
        projection = 2 * model.hidden * model.hidden / parallel.tp
        extra = round(3 * model.norm_numel * model.hidden + projection)
        flops += 2 * batch.tokens / parallel.cp * projection
    if not isinstance(layer.mlp, Experts):
        return [Unit(name, kind, numel + extra, flops, chunk=chunk, source=layer)]
    experts = experts_numel(layer.mlp, model, parallel)
    own_flops = expert_flops(layer.mlp, model, parallel, batch)
    if layer.mlp.per_unit:
        count = num_expert_groups(layer.mlp, parallel)
        group, parts = ("expert" if parallel.ep > 1 else "dense"), range(count)
        each, share = round(experts / count), own_flops / count
        return [
            Unit(name, kind, numel + extra, flops, chunk=chunk, source=layer),
            *(
                Unit(f"{name}.experts.{i}", "experts", each, share, group, chunk, layer)
                for i in parts
            ),
        ]
    if parallel.ep == 1:  # every replica has all experts: they are parameters like the others
        numel, flops = numel + experts, flops + own_flops
        return [Unit(name, kind, numel + extra, flops, chunk=chunk, source=layer)]
    return [
        Unit(name, kind, numel + extra, flops, chunk=chunk, source=layer),
        Unit(f"{name}.experts", "experts", experts, own_flops, "expert", chunk, layer),
    ]


def stage_units(model: Model, parallel: Parallel, batch: Batch, stage: int) -> tuple[Unit, ...]:
    """The units of a rank of pipeline stage `stage`, in the order of the forward pass."""
    units: list[Unit] = []
    word_numel = round(model.vocabulary * model.hidden / parallel.tp)
    last_chunk = parallel.virtual - 1
    if stage == 0:
        numel = word_numel + model.num_positions * model.hidden
        units.append(Unit("embedding", "embedding", numel))
    for chunk, layers in enumerate(chunk_layers(model, parallel, stage)):
        for index, layer in enumerate(layers):
            name = f"layer {chunk}.{index}" if last_chunk else f"layer {index}"
            units += _layer_units(name, chunk, layer, model, parallel, batch)
    if stage == parallel.pp - 1:
        units.append(Unit("final norm", "root", model.norm_numel * model.hidden, chunk=last_chunk))
        for index, layer in enumerate(model.mtp):
            units += _layer_units(f"mtp {index}", last_chunk, layer, model, parallel, batch)
        # A tied weight is held once by a stage that is both first and last.
        numel = 0 if model.is_tied and parallel.pp == 1 else word_numel
        flops = (1 + len(model.mtp)) * output_flops(model, parallel, batch)
        units.append(Unit("output", "output", numel, flops, chunk=last_chunk))
    return tuple(units)
