# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Family and sizes of a model, read from and written as Megatron's arguments."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_asynchzp.errors import ConfigurationError, raise_first

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2"]
WITH_QK_NORMS: tuple[Family, ...] = ("qwen3", "qwen3_moe")
WITH_EXPERTS: tuple[Family, ...] = ("mixtral", "qwen3_moe")

# The one scaling of rotary frequencies that Megatron 0.19 computes (Llama 3.1). Its
# --rope-scaling-factor does not reach the model, which always uses this factor.
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class ExpertsShape:
    """The experts that every layer has in place of its MLP, gated as that is."""

    num: int  # of a layer
    per_token: int  # experts that the router chooses for a token
    ffn_hidden_size: int  # of an expert
    # Whether the weights of the chosen experts are the softmax over their scores, and sum to 1, or
    # the softmax over the scores of all.
    is_normalised: bool


@dataclass(frozen=True)
class ModelShape:
    """A model of a family: one of these six.

    llama: RMSNorm, SwiGLU, rotary positions, no biases. qwen2: the same with biases on q, k and v.
    qwen3: as llama, with an RMSNorm on each head of q and k.
    mixtral: as llama, with experts. qwen3_moe: as qwen3, with experts.
    gpt2: LayerNorm, GELU, learned positions, biases everywhere.
    """

    family: Family
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of the MLP; mixtral, which has none, has an expert's
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int  # rows of the embedding in transformers
    padded_vocab_size: int  # and in Megatron
    max_positions: int
    norm_eps: float
    is_tied: bool
    rotary_base: int = 10000  # not gpt2
    is_rope_scaled: bool = False  # by LLAMA3_SCALING
    is_gelu_tanh: bool = False  # gpt2: the tanh approximation in place of the exact function
    experts: ExpertsShape | None = None
    is_vocab_known: bool = True  # if not, vocab_size may count padding

    def __post_init__(self):
        assert (self.experts is not None) == (self.family in WITH_EXPERTS)
        raise_first(self._faults())

    def _faults(self) -> Iterator[str]:
        heads, groups = self.num_heads, self.num_query_groups
        if heads % groups:
            yield f"{heads} attention heads do not divide into {groups} query groups"
        if self.family == "gpt2" and groups != heads:
            yield "GPT-2 in transformers has no grouped queries"
        # All but Qwen2 and GPT-2 have a head size of their own; Llama's and Mixtral's hidden size
        # must be a multiple of the heads all the same.
        is_free = self.family in WITH_QK_NORMS or (
            self.family in ("llama", "mixtral") and self.hidden_size % self.num_heads == 0
        )
        if self.head_dim * self.num_heads != self.hidden_size and not is_free:
            yield (
                f"heads of size {self.head_dim} x {self.num_heads} are not the hidden size "
                f"{self.hidden_size}, which {self.family} in transformers requires"
            )
        if self.vocab_size > self.padded_vocab_size:
            yield (
                f"a vocabulary of {self.vocab_size} is larger than the {self.padded_vocab_size} "
                "rows of the embedding"
            )
        experts = self.experts
        if experts is not None and self.family == "mixtral" and not experts.is_normalised:
            yield (
                "the softmax before the choice of experts (moe_router_pre_softmax = True) does not "
                "map: Mixtral in transformers takes it over the chosen"
            )
        if experts is not None and experts.per_token == 1 and experts.is_normalised:
            yield (
                "one expert per token, with a weight of 1, does not map: Megatron's router refuses "
                "it"
            )

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_query_groups

    def size_of(self, dim: str) -> int:
        sizes = {
            "hidden": self.hidden_size,
            "head": self.head_dim,
            "heads": self.num_heads * self.head_dim,
            "qkv": (self.num_heads + 2 * self.num_query_groups) * self.head_dim,
            "ffn": self.ffn_hidden_size,
            "gate_up": 2 * self.ffn_hidden_size,
            "vocab": self.padded_vocab_size,
            "positions": self.max_positions,
        }
        if self.experts is not None:
            sizes["experts"] = self.experts.num
            sizes["expert_ffn"] = self.experts.ffn_hidden_size
            sizes["expert_gate_up"] = 2 * self.experts.ffn_hidden_size
        return sizes[dim]


def describe_difference(
    source: str, shape: ModelShape, missing: list[str], foreign: list[str]
) -> str:
    differences = []
    for names, verb in ((missing, "lacks"), (foreign, "has, and no rule maps,")):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            differences.append(f"{verb} {', '.join(names[:3])}{rest}")
    return f"{source} is not a {shape.family} model: it {'; it '.join(differences)}"


_NOTHING = (None, False, 0)

# Megatron's argument -> the values that the families allow, and what any other value means. An
# argument that a checkpoint lacks counts as the first value.
_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "multi_latent_attention": (_NOTHING, "multi-latent attention"),
    "is_hybrid_model": (_NOTHING, "a hybrid model"),
    "hybrid_layer_pattern": (_NOTHING, "a hybrid model"),
    "heterogeneous_layers_config_path": (_NOTHING, "layers that differ"),
    "heterogeneous_layers_config_encoded_json": (_NOTHING, "layers that differ"),
    "experimental_attention_variant": (_NOTHING, "another attention"),
    "linear_attention_freq": (_NOTHING, "linear attention"),
    "mtp_num_layers": (_NOTHING, "multi-token prediction"),
    "spec": (_NOTHING, "a layer specification of its own"),
    "qk_l2_norm": (_NOTHING, "norms of queries and keys"),
    "attention_output_gate": (_NOTHING, "gated attention"),
    "window_size": (_NOTHING, "sliding windows"),
    "softmax_type": (("vanilla",), "another softmax"),
    "squared_relu": (_NOTHING, "squared ReLU"),
    "quick_geglu": (_NOTHING, "quick GEGLU"),
    "use_te_activation_func": (_NOTHING, "Transformer Engine's activations"),
    "glu_linear_offset": (_NOTHING, "an offset in its gated MLP"),
    "activation_func_clamp_value": (_NOTHING, "clamped activations"),
    "apply_residual_connection_post_layernorm": (_NOTHING, "residuals after the norm"),
    "layernorm_zero_centered_gamma": (_NOTHING, "norm weights centred at zero"),
    "rotary_interleaved": (_NOTHING, "interleaved rotary positions"),
    "rotary_percent": ((1.0,), "rotary positions on a part of each head"),
    "rotary_seq_len_interpolation_factor": ((None, 1), "interpolated rotary positions"),
    "no_rope_freq": (_NOTHING, "layers without rotary positions"),
    "use_mup": (_NOTHING, "muP scaling"),
}

# The same for models with experts, without what only changes the losses of training.
_PLAIN_EXPERTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_layer_freq": ((1,), "experts by a pattern of layers"),
    "moe_single_grouped_weight": (_NOTHING, "its experts in one parameter"),
    "moe_shared_expert_intermediate_size": (_NOTHING, "shared experts"),
    "moe_latent_size": (_NOTHING, "experts of a smaller hidden size"),
    "moe_router_score_function": (("softmax",), "another score function in its router"),
    "moe_router_enable_expert_bias": (_NOTHING, "a bias on the choice of experts"),
    "moe_router_topk_scaling_factor": ((*_NOTHING, 1.0), "scaled weights of experts"),
    "moe_router_group_topk": (_NOTHING, "experts that are chosen by group"),
    "moe_router_topk_limited_devices": (_NOTHING, "experts that are chosen by group"),
    "moe_router_force_load_balancing": (_NOTHING, "a router with random scores"),
    "moe_router_force_biased": (_NOTHING, "a router with random scores"),
    "moe_input_jitter_eps": (_NOTHING, "noise in its router"),
    "moe_expert_capacity_factor": (_NOTHING, "experts that drop tokens"),
    "moe_apply_probs_on_input": (_NOTHING, "weights on the input of its experts"),
    "moe_mlp_glu_interleave_size": (_NOTHING, "interleaved halves in the MLPs of its experts"),
}

# With these a router does not choose the experts with the highest scores.
_OTHER_CHOICES = ("sinkhorn", "quantile_balancing")


def read_arguments(args: Namespace, vocab_size: int | None = None) -> ModelShape:
    """Return the shape of a model that was trained with `args`, validated or from a checkpoint.

    If the model is of no family, a ConfigurationError names the argument. `vocab_size`: rows of the
    embedding that are not padding, if the arguments lack it.
    """
    _check_plain(args, _PLAIN)
    is_scaled = bool(getattr(args, "use_rope_scaling", False))
    factor = getattr(args, "rope_scaling_factor", LLAMA3_SCALING["factor"])
    if is_scaled and factor != LLAMA3_SCALING["factor"]:
        raise ConfigurationError(
            f"rope_scaling_factor = {factor} does not map: Megatron 0.19 computes with 8 all the "
            "same"
        )
    family = _family(args)
    experts = _experts(args) if family in WITH_EXPERTS else None
    is_rotary = family != "gpt2"
    return ModelShape(
        family=family,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        # Mixtral's configuration holds one size, and only that of the experts computes anything.
        ffn_hidden_size=(
            experts.ffn_hidden_size if experts and family == "mixtral" else args.ffn_hidden_size
        ),
        num_heads=args.num_attention_heads,
        num_query_groups=(
            args.num_query_groups if args.group_query_attention else args.num_attention_heads
        ),
        head_dim=args.kv_channels,
        vocab_size=vocab_size or args.vocab_size or args.padded_vocab_size,
        padded_vocab_size=args.padded_vocab_size,
        is_vocab_known=bool(vocab_size or args.vocab_size),
        max_positions=args.max_position_embeddings,
        norm_eps=getattr(args, "layernorm_epsilon", 1e-5),
        is_tied=not args.untie_embeddings_and_output_weights,
        rotary_base=args.rotary_base if is_rotary else 10000,
        is_rope_scaled=is_rotary and is_scaled,
        # Megatron's fused kernel is the approximation, its unfused function is not.
        is_gelu_tanh=not is_rotary and bool(args.bias_gelu_fusion),
        experts=experts,
    )


def _check_plain(args: Namespace, plain: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (allowed, words) in plain.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise ConfigurationError(
                f"the model has {words} ({name} = {value}), which does not map"
            )


def _experts(args: Namespace) -> ExpertsShape:
    _check_plain(args, _PLAIN_EXPERTS)
    balancing = getattr(args, "moe_router_load_balancing_type", "none")
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in _OTHER_CHOICES:
            raise ConfigurationError(
                "the model has experts that are not those with the highest scores "
                f"(moe_router_load_balancing_type = {kind}), which does not map"
            )
    return ExpertsShape(
        num=args.num_experts,
        per_token=getattr(args, "moe_router_topk", 2),
        ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size,
        is_normalised=not getattr(args, "moe_router_pre_softmax", False),
    )


def _family(args: Namespace) -> Family:
    has_biases = args.add_bias_linear
    has_qkv_bias = has_biases or getattr(args, "add_qkv_bias", False)
    has_norms = bool(getattr(args, "qk_layernorm", False))
    has_experts = bool(getattr(args, "num_experts", None))
    if has_norms and has_qkv_bias:
        raise ConfigurationError(
            "the model has norms of queries and keys (qk_layernorm = True) and biases, which "
            "does not map"
        )
    if has_experts and (has_qkv_bias or not args.swiglu):
        raise ConfigurationError(
            f"the model has experts (num_experts = {args.num_experts}) with biases or without "
            "SwiGLU, which does not map"
        )
    spelled = {
        "normalization": args.normalization,
        "position_embedding_type": args.position_embedding_type,
        "swiglu": bool(args.swiglu),
        "add_bias_linear": bool(has_biases),
    }
    kind = tuple(spelled.values())
    if kind == ("RMSNorm", "rope", True, False):
        if has_norms:
            return "qwen3_moe" if has_experts else "qwen3"
        if has_experts:
            return "mixtral"
        return "qwen2" if has_qkv_bias else "llama"
    if kind == ("LayerNorm", "learned_absolute", False, True):
        return "gpt2"
    text = ", ".join(f"{name} = {value}" for name, value in spelled.items())
    raise ConfigurationError(
        f"{text} is neither Llama (RMSNorm, rope, SwiGLU, no bias) nor GPT-2 (LayerNorm, "
        "learned_absolute, GELU, biases)"
    )


def write_arguments(shape: ModelShape) -> Namespace:
    """Return the arguments that a checkpoint of this model keeps, the inverse of read_arguments.

    Megatron's --use-checkpoint-args finds all that it looks for, which does not include the epsilon
    of the norms nor scaled rotary positions.
    """
    is_gpt2, experts = shape.family == "gpt2", shape.experts
    expert_args: dict[str, Any] = {"num_experts": None}
    if experts is not None:
        expert_args = {
            "num_experts": experts.num,
            "moe_layer_freq": 1,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_router_topk": experts.per_token,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not experts.is_normalised,
        }
    return Namespace(
        **expert_args,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        group_query_attention=shape.num_query_groups != shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        seq_length=shape.max_positions,
        max_position_embeddings=shape.max_positions,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=not is_gpt2,
        rotary_base=shape.rotary_base,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=shape.is_rope_scaled,
        rope_scaling_factor=LLAMA3_SCALING["factor"],
        normalization="LayerNorm" if is_gpt2 else "RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        swiglu=not is_gpt2,
        squared_relu=False,
        bias_gelu_fusion=shape.is_gelu_tanh,
        add_bias_linear=is_gpt2,
        add_qkv_bias=shape.family in ("qwen2", "gpt2"),
        qk_layernorm=shape.family in WITH_QK_NORMS,
        untie_embeddings_and_output_weights=not shape.is_tied,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.padded_vocab_size,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
    )


# The arguments that a command line needs, as flags with a value and as flags without.
_VALUES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("seq_length", "max_position_embeddings", "normalization", "position_embedding_type"),
)
_SWITCHES = (
    *("group_query_attention", "swiglu", "use_rope_scaling", "qk_layernorm"),
    *("moe_router_pre_softmax", "untie_embeddings_and_output_weights"),
)


def command_line(shape: ModelShape) -> list[str]:
    args, values = vars(write_arguments(shape)), list(_VALUES)
    if shape.num_query_groups != shape.num_heads:
        values += ["num_query_groups"]
    if shape.experts is not None:
        values += ["num_experts", "moe_ffn_hidden_size", "moe_router_topk"]
    flags = [f"--norm-epsilon {shape.norm_eps!r}"]
    if shape.family != "gpt2":
        values += ["rotary_base"]
        flags += ["--disable-bias-linear", *["--add-qkv-bias"] * (shape.family == "qwen2")]
    elif not shape.is_gelu_tanh:
        flags += ["--no-bias-gelu-fusion"]
    flags += [f"--{name.replace('_', '-')} {args[name]}" for name in values]
    return flags + [f"--{name.replace('_', '-')}" for name in _SWITCHES if args.get(name)]
