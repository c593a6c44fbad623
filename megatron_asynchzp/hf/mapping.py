# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tables that pair Megatron's tensors with those of transformers, with exact conversions.

It lists the tensors of a whole model in their order of use, and refuses models with others. The
export of a checkpoint and the stream of a running model share it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import write_config
from megatron_asynchzp.hf.output_folder import complete_or_absent
from megatron_asynchzp.hf.safetensors_folder import TensorInfo, write_folder
from megatron_asynchzp.hf.shape import WITH_QK_NORMS, Family, ModelShape, describe_difference

LAYERS = "decoder.layers."
EXPERTS = f"{LAYERS}mlp.experts.experts."


@dataclass(frozen=True)
class TensorRule:
    """A tensor of Megatron and the tensors of transformers that hold the same values."""

    # In a torch_dist checkpoint. Below LAYERS a key holds all layers, stacked in dim 0, and below
    # EXPERTS all experts of each layer too, in dim 1.
    key: str
    # In a Hugging Face directory; the first "{}" is the layer, the second the expert.
    names: tuple[str, ...]
    dims: tuple[str, ...]  # of a layer's (expert's) tensor, see ModelShape.size_of
    # Inverse of each other; both also take meta tensors.
    to_hf: Callable[[Tensor, ModelShape], tuple[Tensor, ...]]
    to_megatron: Callable[[tuple[Tensor, ...], ModelShape], Tensor]
    twin: str | None = None  # a second key under which an import writes the tensor

    def stack(self, shape: ModelShape) -> tuple[int, ...]:
        return _stack_below(self.key, shape)

    def places(self, shape: ModelShape) -> Iterator[tuple[int, ...]]:
        return product(*map(range, self.stack(shape)))

    def names_of(self, place: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(name.format(*place) for name in self.names)

    def megatron_size(self, shape: ModelShape) -> torch.Size:
        return torch.Size(shape.size_of(dim) for dim in self.dims)

    def hf_sizes(self, shape: ModelShape) -> list[torch.Size]:
        whole = torch.empty(self.megatron_size(shape), device="meta")
        return [piece.shape for piece in self.to_hf(whole, shape)]


def _stack_below(key: str, shape: ModelShape) -> tuple[int, ...]:
    if not key.startswith(LAYERS):
        return ()
    if not key.startswith(EXPERTS):
        return (shape.num_layers,)
    return (shape.num_layers, shape.size_of("experts"))


def split_qkv(qkv: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Split Megatron's linear_qkv, weight or bias, into the rows of q, k and v.

    Its query groups follow each other, each as  q q .. q k v   (head_dim rows per letter)
    """
    group = (shape.num_query_groups, shape.heads_per_group + 2, shape.head_dim)
    q, k, v = qkv.view(*group, *qkv.shape[1:]).split([shape.heads_per_group, 1, 1], dim=1)
    return tuple(part.reshape(-1, *qkv.shape[1:]) for part in (q, k, v))


def join_qkv(parts: tuple[Tensor, ...], shape: ModelShape) -> Tensor:
    by_group = [
        part.view(shape.num_query_groups, -1, shape.head_dim, *part.shape[1:]) for part in parts
    ]
    return torch.cat(by_group, dim=1).view(-1, *parts[0].shape[1:])


# to_hf and to_megatron of a rule; transformers' Conv1D computes x @ weight.
type _Pair = tuple[
    Callable[[Tensor, ModelShape], tuple[Tensor, ...]],
    Callable[[tuple[Tensor, ...], ModelShape], Tensor],
]
_KEPT: _Pair = (lambda whole, _: (whole,), lambda parts, _: parts[0])
_GATE_UP: _Pair = (
    lambda whole, _: tuple(half.contiguous() for half in whole.chunk(2)),
    lambda parts, _: torch.cat(parts),
)
_CONV: _Pair = (
    lambda whole, _: (whole.t().contiguous(),),
    lambda parts, _: parts[0].t().contiguous(),
)


def _to_conv_qkv(qkv: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    whole = torch.cat(split_qkv(qkv, shape))
    return (whole.t().contiguous() if whole.dim() == 2 else whole,)


def _from_conv_qkv(parts: tuple[Tensor, ...], shape: ModelShape) -> Tensor:
    whole = parts[0].t().contiguous() if parts[0].dim() == 2 else parts[0]
    return join_qkv(whole.chunk(3), shape)


def _drop_padding(table: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    return (table[: shape.vocab_size].contiguous(),)


def _pad(parts: tuple[Tensor, ...], shape: ModelShape) -> Tensor:
    table = parts[0]
    padding = table.new_zeros(shape.padded_vocab_size - len(table), *table.shape[1:])
    return torch.cat([table, padding])


def _rule(key: str, names: str, dims: str, pair: _Pair = _KEPT) -> TensorRule:
    return TensorRule(key, tuple(names.split()), tuple(dims.split()), *pair)


_QKV = f"{LAYERS}self_attention.linear_qkv."
_PROJ = f"{LAYERS}self_attention.linear_proj."
_FC1 = f"{LAYERS}mlp.linear_fc1."
_FC2 = f"{LAYERS}mlp.linear_fc2."
_VOCABULARY, _QKV_ROWS = (_drop_padding, _pad), (split_qkv, join_qkv)

_ATTN, _MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."

# fmt: off
_WITHOUT_MLP = (
    _rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab hidden",
          _VOCABULARY),
    _rule(f"{_QKV}layer_norm_weight", "model.layers.{}.input_layernorm.weight", "hidden"),
    _rule(f"{_QKV}weight", f"{_ATTN}q_proj.weight {_ATTN}k_proj.weight {_ATTN}v_proj.weight",
          "qkv hidden", _QKV_ROWS),
    _rule(f"{_PROJ}weight", f"{_ATTN}o_proj.weight", "hidden heads"),
    _rule("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
)
_MLP_NORM = _rule(
    f"{_FC1}layer_norm_weight", "model.layers.{}.post_attention_layernorm.weight", "hidden"
)
_LLAMA = (
    *_WITHOUT_MLP,
    _MLP_NORM,
    _rule(f"{_FC1}weight", f"{_MLP}gate_proj.weight {_MLP}up_proj.weight",
          "gate_up hidden", _GATE_UP),
    _rule(f"{_FC2}weight", f"{_MLP}down_proj.weight", "hidden ffn"),
)
# fmt: on

# fmt: off
_QWEN2 = (
    *_LLAMA,
    _rule(f"{_QKV}bias", f"{_ATTN}q_proj.bias {_ATTN}k_proj.bias {_ATTN}v_proj.bias",
          "qkv", _QKV_ROWS),
)
# fmt: on

_Q_NORM = f"{LAYERS}self_attention.q_layernorm"
_K_NORM = f"{LAYERS}self_attention.k_layernorm"
_QK_NORMS = (
    _rule(f"{_Q_NORM}.weight", f"{_ATTN}q_norm.weight", "head"),
    _rule(f"{_K_NORM}.weight", f"{_ATTN}k_norm.weight", "head"),
)
_QWEN3 = (*_LLAMA, *_QK_NORMS)

# Megatron's own layers read the norm before experts under the first key, Transformer Engine's under
# the second.
_EXPERTS_NORM = replace(_MLP_NORM, twin=f"{LAYERS}pre_mlp_layernorm.weight")


def _experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    block = f"model.layers.{{}}.{block}"
    expert = f"{block}.experts.{{}}"
    return (
        _EXPERTS_NORM,
        _rule(f"{LAYERS}mlp.router.weight", f"{block}.gate.weight", "experts hidden"),
        _rule(
            f"{EXPERTS}linear_fc1.weight",
            f"{expert}.{gate}.weight {expert}.{up}.weight",
            "expert_gate_up hidden",
            _GATE_UP,
        ),
        _rule(f"{EXPERTS}linear_fc2.weight", f"{expert}.{down}.weight", "hidden expert_ffn"),
    )


_MIXTRAL = (*_WITHOUT_MLP, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2"))
_QWEN3_MOE = (
    *_WITHOUT_MLP,
    *_QK_NORMS,
    *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)

_H = "transformer.h.{}."
_CONV_QKV = (_to_conv_qkv, _from_conv_qkv)

_GPT2 = (
    _rule(
        "embedding.word_embeddings.weight", "transformer.wte.weight", "vocab hidden", _VOCABULARY
    ),
    _rule("embedding.position_embeddings.weight", "transformer.wpe.weight", "positions hidden"),
    _rule(f"{_QKV}layer_norm_weight", f"{_H}ln_1.weight", "hidden"),
    _rule(f"{_QKV}layer_norm_bias", f"{_H}ln_1.bias", "hidden"),
    _rule(f"{_QKV}weight", f"{_H}attn.c_attn.weight", "qkv hidden", _CONV_QKV),
    _rule(f"{_QKV}bias", f"{_H}attn.c_attn.bias", "qkv", _CONV_QKV),
    _rule(f"{_PROJ}weight", f"{_H}attn.c_proj.weight", "hidden heads", _CONV),
    _rule(f"{_PROJ}bias", f"{_H}attn.c_proj.bias", "hidden"),
    _rule(f"{_FC1}layer_norm_weight", f"{_H}ln_2.weight", "hidden"),
    _rule(f"{_FC1}layer_norm_bias", f"{_H}ln_2.bias", "hidden"),
    _rule(f"{_FC1}weight", f"{_H}mlp.c_fc.weight", "ffn hidden", _CONV),
    _rule(f"{_FC1}bias", f"{_H}mlp.c_fc.bias", "ffn"),
    _rule(f"{_FC2}weight", f"{_H}mlp.c_proj.weight", "hidden ffn", _CONV),
    _rule(f"{_FC2}bias", f"{_H}mlp.c_proj.bias", "hidden"),
    _rule("decoder.final_layernorm.weight", "transformer.ln_f.weight", "hidden"),
    _rule("decoder.final_layernorm.bias", "transformer.ln_f.bias", "hidden"),
)

_OUTPUT = _rule("output_layer.weight", "lm_head.weight", "vocab hidden", _VOCABULARY)

_TABLES: dict[Family, tuple[TensorRule, ...]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "gpt2": _GPT2,
}

# A checkpoint may keep a norm by itself instead of with the matrix that follows it.
OTHER_KEYS = {
    f"{prefix}layer_norm_{kind}": f"{LAYERS}{norm}.{kind}"
    for prefix, norm in ((_QKV, "input_layernorm"), (_FC1, "pre_mlp_layernorm"))
    for kind in ("weight", "bias")
}

_STATEFUL = (
    _QKV.removesuffix("."),
    _PROJ.removesuffix("."),
    f"{LAYERS}self_attention.core_attention",
    "decoder.final_layernorm",
)
_STATEFUL_MLP = (_FC1.removesuffix("."), _FC2.removesuffix("."))
_STATEFUL_EXPERTS = (f"{EXPERTS}linear_fc1", f"{EXPERTS}linear_fc2", f"{LAYERS}pre_mlp_layernorm")


def state_keys(shape: ModelShape) -> Iterator[str]:
    """Yield the keys of the modules' extra states, which Megatron asks for and are empty here.

    Those of core_attention and of the norms are Transformer Engine's.
    """
    modules = (*_STATEFUL, *(_STATEFUL_EXPERTS if shape.experts else _STATEFUL_MLP))
    if shape.family in WITH_QK_NORMS:
        modules = (*modules, _Q_NORM, _K_NORM)
    for module in modules:
        stack = _stack_below(module, shape) or (1,)
        for place in product(*map(range, stack)):
            yield f"{module}._extra_state/shard_{_dotted(place)}_{_dotted(stack)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def rules_of(shape: ModelShape) -> tuple[TensorRule, ...]:
    """Return the rules of the model's family, with an output layer unless it is tied."""
    table = _TABLES[shape.family]
    return table if shape.is_tied else (*table, _OUTPUT)


_FIRST = "embedding."


class Job(NamedTuple):
    """A tensor of Megatron to convert."""

    rule: TensorRule
    place: tuple[int, ...]  # (), (layer,) or (layer, expert)

    @property
    def names(self) -> tuple[str, ...]:
        return self.rule.names_of(self.place)

    @property
    def part(self) -> tuple[int, ...]:
        """Sorts by use: (0,) before all layers, (1, layer), (2,) after all layers."""
        if self.rule.key.startswith(LAYERS):
            return (1, self.place[0])
        return (0,) if self.rule.key.startswith(_FIRST) else (2,)

    def convert(self, whole: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.rule.to_hf(whole, shape), strict=True)


def jobs_in_order_of_use(shape: ModelShape) -> list[Job]:
    jobs = [Job(rule, place) for rule in rules_of(shape) for place in rule.places(shape)]
    return sorted(jobs, key=lambda job: job.part)


def write_model(
    output: Path,
    shape: ModelShape,
    dtype_of: Callable[[TensorRule], torch.dtype],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_nbytes: int,
) -> None:
    """Write tensors, which come in order of use, as a Hugging Face directory or not at all.

    dtype_of gives the dtype in which the tensors of a rule come and are written.
    """
    infos = {
        name: TensorInfo(size, dtype_of(job.rule))
        for job in jobs_in_order_of_use(shape)
        for name, size in zip(job.names, job.rule.hf_sizes(shape), strict=True)
    }
    with complete_or_absent(output) as folder:
        write_config(shape, folder, dtype_of(rules_of(shape)[0]))
        write_folder(folder, infos, tensors, max_file_nbytes)


def match_keys(
    source: str, sizes: Mapping[str, Collection[int]], shape: ModelShape
) -> dict[str, str]:
    """Return the key of each rule's tensor in a model with tensors of `sizes`, by the rule's key.

    Layers and experts are stacked. Tensors or sizes other than those of `shape` are a
    ConfigurationError, which calls the model `source`.
    """
    matched, missing = {}, []
    for rule in rules_of(shape):
        key = next((k for k in (rule.key, OTHER_KEYS.get(rule.key)) if k in sizes), None)
        if key is None:
            missing.append(rule.key)
            continue
        matched[rule.key] = key
        wanted = [*rule.stack(shape), *rule.megatron_size(shape)]
        if list(sizes[key]) != wanted:
            raise ConfigurationError(
                f"{key} has size {list(sizes[key])}, but {wanted} by the arguments"
            )
    twins = {rule.twin for rule in rules_of(shape)}
    foreign = sorted(set(sizes) - set(matched.values()) - twins)
    if missing or foreign:
        raise ConfigurationError(describe_difference(source, shape, missing, foreign))
    return matched
