# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a model as plain numbers: its layers, and a rank's parameters and forward FLOPs.

Must not import Megatron or torch.distributed. Every count is of a rank and a micro-batch: after
tensor, pipeline, context and expert parallelism, before the sharding over data-parallel ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

from megatron_asynchzp.engine.sharding.layout import PARAM_ALIGNMENT_NUMEL, round_up

GroupKey = Literal["dense", "expert"]
Shape = tuple[float, ...]
"""Of a tensor on a rank: a weight's outputs and inputs, a vector's length. One size is a rank's
share, a fraction where ranks share out less than they are."""


@dataclass(frozen=True)
class Attention:
    """Multi-head or grouped-query attention."""

    num_heads: int
    num_groups: int
    head_dim: int  # of queries, keys and values
    has_qk_norm: bool = False
    has_qkv_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention."""

    num_heads: int
    q_rank: int  # of the compressed queries, 0 without
    kv_rank: int  # of the compressed keys and values
    qk_dim: int
    rope_dim: int
    v_dim: int
    has_qk_norm: bool = False


@dataclass(frozen=True)
class Mamba:
    """A Mamba 2 mixer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int = 4  # the width of its convolution


@dataclass(frozen=True)
class Mlp:
    """A dense MLP."""

    ffn: int  # the width between its projections
    is_gated: bool  # SwiGLU and its kin


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    num_experts: int
    topk: int
    ffn: int  # of an expert
    is_gated: bool
    shared_ffn: int = 0  # of the shared experts, 0 without
    has_shared_gate: bool = False
    has_router_bias: bool = False  # a learned bias, not that of load balancing


@dataclass(frozen=True)
class Layer:
    """One layer: a mixer, then an MLP; a hybrid model's layers have one of the two."""

    mixer: Attention | LatentAttention | Mamba | None
    mlp: Mlp | Experts | None


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of a model that is frozen otherwise."""

    rank: int  # of each
    layers: frozenset[str]  # projections of a layer that have one, of ADAPTED


ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of a layer's projections, in the order of the forward."""


@dataclass(frozen=True)
class Model:
    """A language model."""

    hidden: int
    vocabulary: int  # padded
    layers: tuple[Layer, ...]  # of the decoder, all pipeline stages
    mtp: tuple[Layer, ...] = ()  # the layer inside each multi-token-prediction module
    is_tied: bool = True  # embedding and output share one weight
    has_bias: bool = False  # of every projection
    norm_numel: int = 1  # per hidden element, 2 for LayerNorm, 1 for RMSNorm
    num_positions: int = 0  # of learned position embeddings, 0 without
    itemsize: int = 2  # bytes of a parameter and of an activation
    adapters: Adapters | None = None  # None if the whole model is trained

    @property
    def units(self) -> "tuple[Unit, ...]":
        """Units of the whole model on one rank, a tied weight once."""
        return stage_units(self, Parallel(), Batch(1, 1), 0)

    @property
    def num_params(self) -> int:
        return sum(unit.numel for unit in self.units)


@dataclass(frozen=True)
class Parallel:
    """Megatron's parallel sizes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None  # None for tp
    virtual: int = 1  # model chunks on each rank
    sequence_parallel: bool = False
    # decoder layers of each chunk (stages of chunk 0, then of chunk 1); None for equal shares
    stage_layers: tuple[int, ...] | None = None

    @property
    def experts_tp(self) -> int:
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_group(self) -> GroupKey:
        """The sharding group of experts, another one if expert parallelism moves their copies."""
        return "expert" if self.ep > 1 or self.experts_tp != self.tp else "dense"


@dataclass(frozen=True)
class Batch:
    """A micro-batch of a data-parallel replica, `size` sequences of `seq_length` tokens."""

    size: int
    seq_length: int
    num_micro_batches: int = 1

    @property
    def tokens(self) -> int:
        return self.size * self.seq_length


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered, used and released together, and their computation."""

    name: str
    # the holder: "experts" are units outside their layer if expert parallelism divides them or they
    # are used group by group; "adapters" too; "positions" are an embedding's, outside the words
    # that the output layer shares
    kind: Literal["embedding", "positions", "layer", "experts", "adapters", "mtp", "output", "root"]
    shapes: Mapping[Shape, int]  # of its tensors on this rank -> number of each
    # forward, of a micro-batch on this rank (backward takes twice as many, recomputation once more)
    flops: float = 0.0
    group: GroupKey = "dense"
    chunk: int = 0  # index among the rank's model chunks
    source: Layer | None = field(default=None, repr=False)  # the layer, None for the rest
    words_numel: int = 0  # elements of the words' weight, in an embedding or an output layer
    is_trained: bool = True  # frozen units have parameters and no other state

    @cached_property
    def numels(self) -> dict[int, int]:
        numels = Counter[int]()
        for shape, count in self.shapes.items():
            numels[round(prod(shape))] += count
        return numels

    @cached_property
    def numel(self) -> int:
        return sum(numel * count for numel, count in self.numels.items())

    @cached_property
    def aligned_numel(self) -> int:
        return sum(
            round_up(numel, PARAM_ALIGNMENT_NUMEL) * count for numel, count in self.numels.items()
        )

    @cached_property
    def matrix_numel(self) -> int:
        """Elements that Muon treats as matrices: neither vectors nor the weights of words."""
        two = (round(prod(shape)) * n for shape, n in self.shapes.items() if len(shape) == 2)
        return sum(two) - self.words_numel

    @property
    def layer(self) -> str:
        """The name of the layer that needs it at the same time; "" for the root."""
        if self.kind == "positions":
            return "embedding"
        return "" if self.kind == "root" else self.name.removesuffix(f".{self.kind}")


# ---- parameters


def _linear(inputs: float, outputs: float, has_bias: bool) -> list[Shape]:
    return [(outputs, inputs)] + [(outputs,)] * has_bias


def _norm(width: float, model: Model) -> list[Shape]:
    return [(width,)] * model.norm_numel


def _numel(shapes: Sequence[Shape]) -> float:
    return sum(map(prod, shapes))


def _attention(part: Attention, model: Model, tp: int) -> list[Shape]:
    width = part.num_heads * part.head_dim / tp
    # With fewer groups than ranks, Megatron gives every rank one group's share of the projection.
    kv = part.num_groups * part.head_dim / tp
    has_bias = model.has_bias or part.has_qkv_bias
    shapes = _linear(width, model.hidden, model.has_bias)
    shapes += _linear(model.hidden, width + 2 * kv, has_bias)
    return shapes + 2 * part.has_qk_norm * _norm(part.head_dim, model)


def _latent(part: LatentAttention, model: Model, tp: int) -> list[Shape]:
    """Its projections to the ranks are without bias; Megatron's local layers split them too."""
    heads = part.num_heads / tp
    shapes = _linear(heads * part.v_dim, model.hidden, model.has_bias)
    shapes += _linear(part.q_rank or model.hidden, heads * (part.qk_dim + part.rope_dim), False)
    shapes += _linear(model.hidden, (part.kv_rank + part.rope_dim) / tp, False)
    shapes += _linear(part.kv_rank, heads * (part.qk_dim + part.v_dim), False)
    if part.q_rank:
        shapes += _linear(model.hidden, part.q_rank / tp, False)
    for width in (part.q_rank, part.kv_rank) if part.has_qk_norm else ():
        shapes += _norm(width, model)
    return shapes


def _mamba(part: Mamba, model: Model, tp: int) -> list[Shape]:
    inner = part.num_heads * part.head_dim / tp
    convolved = inner + 2 * part.num_groups * part.state_dim / tp
    heads = part.num_heads / tp
    shapes = _linear(model.hidden, inner + convolved + heads, False)
    shapes += [(convolved, 1, part.kernel), (convolved,)]
    # Per head: A, D and the bias of the time step. The gated norm has one weight an element.
    return shapes + [(heads,)] * 3 + [(inner,), *_linear(inner, model.hidden, False)]


def _mlp(ffn: float, is_gated: bool, model: Model, has_bias: bool | None = None) -> list[Shape]:
    has_bias = model.has_bias if has_bias is None else has_bias
    first = _linear(model.hidden, ffn * (1 + is_gated), has_bias)
    return first + _linear(ffn, model.hidden, has_bias)


def _beside_experts(part: Experts, model: Model, tp: int) -> list[Shape]:
    shapes = _linear(model.hidden, part.num_experts, part.has_router_bias)
    if part.shared_ffn:
        shapes += _mlp(part.shared_ffn / tp, part.is_gated, model, has_bias=False)
        shapes += [(1, model.hidden)] * part.has_shared_gate
    return shapes


def _mixer(part: Attention | LatentAttention | Mamba | None, model: Model, tp: int) -> list[Shape]:
    match part:
        case Attention():
            return _attention(part, model, tp)
        case LatentAttention():
            return _latent(part, model, tp)
        case Mamba():
            return _mamba(part, model, tp)
        case None:
            return []


def _behind(part: Mlp | Experts | None, model: Model, tp: int) -> list[Shape]:
    """Return the shapes behind the mixer, without those of experts."""
    match part:
        case Mlp():
            return _mlp(part.ffn / tp, part.is_gated, model)
        case Experts():
            return _beside_experts(part, model, tp)
        case None:
            return []


def _layer(layer: Layer, model: Model, parallel: Parallel) -> list[Shape]:
    tp, shapes = parallel.tp, []
    for part in (layer.mixer, layer.mlp):
        shapes += _norm(model.hidden, model) if part is not None else []
    return shapes + _mixer(layer.mixer, model, tp) + _behind(layer.mlp, model, tp)


def _expert(part: Experts, model: Model, parallel: Parallel) -> list[Shape]:
    return _mlp(part.ffn / parallel.experts_tp, part.is_gated, model)


# ---- FLOPs


def mixer_flops(layer: Layer, model: Model, parallel: Parallel, batch: Batch) -> float:
    """Return forward FLOPs of attention or Mamba; causal attention counts half of its scores."""
    tokens, tp, part = batch.tokens / parallel.cp, parallel.tp, layer.mixer
    pairs = tokens * batch.seq_length / 2
    flops = 2 * tokens * _numel(_mixer(part, model, tp))
    match part:
        case Attention():
            flops += 4 * pairs * part.num_heads * part.head_dim / tp
        case LatentAttention():
            per_pair = part.num_heads * (part.qk_dim + part.rope_dim + part.v_dim) / tp
            flops += 2 * pairs * per_pair
        case Mamba():
            flops += 6 * tokens * (part.num_heads * part.head_dim / tp) * part.state_dim
    return flops


def expert_flops(part: Experts, model: Model, parallel: Parallel, batch: Batch) -> float:
    numel = _numel(_expert(part, model, parallel))
    # Expert parallelism moves tokens between replicas: on average each rank computes as many.
    tokens = batch.tokens / parallel.cp * parallel.experts_tp / parallel.tp
    return 2 * tokens * part.topk * numel


def layer_flops(layer: Layer, model: Model, parallel: Parallel, batch: Batch) -> float:
    weights = _numel(_behind(layer.mlp, model, parallel.tp))
    return mixer_flops(layer, model, parallel, batch) + 2 * batch.tokens / parallel.cp * weights


def output_flops(model: Model, parallel: Parallel, batch: Batch) -> float:
    return 2 * batch.tokens / parallel.cp * model.hidden * model.vocabulary / parallel.tp


# ---- units


def chunk_layers(model: Model, parallel: Parallel, stage: int) -> tuple[tuple[Layer, ...], ...]:
    """Return the decoder layers of each model chunk of a stage, or raise ValueError."""
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
    shapes = Counter(_layer(layer, model, parallel))
    flops = layer_flops(layer, model, parallel, batch)
    if kind == "mtp":
        flops += 2 * batch.tokens / parallel.cp * _numel(_mtp_projection(model, parallel))
    own = Unit(name, kind, shapes, flops, chunk=chunk, source=layer)
    if not isinstance(layer.mlp, Experts):
        return [own]
    local = round(layer.mlp.num_experts / parallel.ep)
    expert = Counter(_expert(layer.mlp, model, parallel))
    experts = {shape: times * local for shape, times in expert.items()}
    share = expert_flops(layer.mlp, model, parallel, batch)
    group = parallel.expert_group
    if group == "dense":
        # Every replica has all experts: they are parameters like the others.
        return [replace(own, shapes=shapes + Counter(experts), flops=flops + share)]
    return [own, Unit(f"{name}.experts", "experts", experts, share, group, chunk, layer)]


def without_experts(unit: Unit, model: Model, parallel: Parallel) -> int:
    assert unit.source is not None
    return replace(unit, shapes=Counter(_layer(unit.source, model, parallel))).matrix_numel


def _mtp_projection(model: Model, parallel: Parallel) -> list[Shape]:
    """Return the projection of hidden states and next embeddings, which the root has."""
    return _linear(2 * model.hidden, model.hidden / parallel.tp, False)


def projections(part: Attention, mlp: Mlp, model: Model) -> dict[str, tuple[float, float]]:
    width, kv = part.num_heads * part.head_dim, part.num_groups * part.head_dim
    return {
        "linear_qkv": (model.hidden, width + 2 * kv),
        "linear_proj": (width, model.hidden),
        "linear_fc1": (model.hidden, mlp.ffn * (1 + mlp.is_gated)),
        "linear_fc2": (mlp.ffn, model.hidden),
    }


def _with_adapters(unit: Unit, model: Model, parallel: Parallel, batch: Batch) -> list[Unit]:
    """Yield the unit, frozen, and adapters, both of whose matrices tensor-parallel ranks split."""
    frozen, layer = replace(unit, is_trained=False), unit.source
    if model.adapters is None or layer is None:
        return [frozen]
    assert isinstance(layer.mixer, Attention) and isinstance(layer.mlp, Mlp)
    rank, tp = model.adapters.rank, parallel.tp
    shapes: list[Shape] = []
    for name, (inputs, outputs) in projections(layer.mixer, layer.mlp, model).items():
        if name in model.adapters.layers:
            shapes += [(rank, inputs / tp), (outputs / tp, rank)]
    flops = 2 * batch.tokens / parallel.cp * _numel(shapes)
    name = f"{unit.name}.adapters"
    return [frozen, Unit(name, "adapters", Counter(shapes), flops, chunk=unit.chunk)]


def _words(model: Model, parallel: Parallel) -> Shape:
    return model.vocabulary / parallel.tp, model.hidden


def _embedding(chunk: int, model: Model, parallel: Parallel) -> list[Unit]:
    """Yield a unit, and another for a weight that is used elsewhere too."""
    words = _words(model, parallel)
    shape = model.num_positions, model.hidden
    positions = Counter[Shape]({shape: 1} if model.num_positions else {})
    is_apart = model.is_tied or (bool(model.mtp) and parallel.pp > 1)
    shapes = Counter([words]) + (Counter() if is_apart else positions)
    numel = round(prod(words))
    units = [Unit("embedding", "embedding", shapes, chunk=chunk, words_numel=numel)]
    if is_apart and positions:
        units.append(Unit("positions", "positions", positions, chunk=chunk))
    return units


def stage_units(model: Model, parallel: Parallel, batch: Batch, stage: int) -> tuple[Unit, ...]:
    """Return the units of a rank of pipeline stage `stage`, in the order of the forward pass."""
    units: list[Unit] = []
    words = _words(model, parallel)
    last_chunk = parallel.virtual - 1
    chunks = chunk_layers(model, parallel, stage)
    is_last = stage == parallel.pp - 1
    if stage == 0:
        units += _embedding(0, model, parallel)
    for chunk, layers in enumerate(chunks):
        if is_last and chunk == last_chunk and model.mtp and parallel.pp > 1:
            units += _embedding(chunk, model, parallel)
        for index, layer in enumerate(layers):
            name = f"layer {chunk}.{index}" if last_chunk else f"layer {index}"
            units += _layer_units(name, chunk, layer, model, parallel, batch)
    if is_last:
        root = Counter(_norm(model.hidden, model))
        for _ in model.mtp:  # three norms, and a projection
            root.update([*3 * _norm(model.hidden, model), *_mtp_projection(model, parallel)])
        units.append(Unit("final norm", "root", root, chunk=last_chunk))
        for index, layer in enumerate(model.mtp):
            units += _layer_units(f"mtp {index}", last_chunk, layer, model, parallel, batch)
        # A tied weight is held once by a stage that is both first and last.
        has_weight = not model.is_tied or parallel.pp > 1
        flops = (1 + len(model.mtp)) * output_flops(model, parallel, batch)
        weights = {words: 1} if has_weight else {}
        held = round(prod(words)) * has_weight
        units.append(Unit("output", "output", weights, flops, chunk=last_chunk, words_numel=held))
    if model.adapters is not None:
        units = [part for unit in units for part in _with_adapters(unit, model, parallel, batch)]
    return tuple(units)
