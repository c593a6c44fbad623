# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Megatron's arguments of a model, and refuses models of no family here."""

from argparse import Namespace
from typing import Any

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.shape import (
    LLAMA3_SCALING,
    WITH_EXPERTS,
    WITH_QK_NORMS,
    ExpertsShape,
    Family,
    ModelShape,
)

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
    """Return the shape of a model that was trained with these arguments.

    Args:
        args: As Megatron validated them, or as a checkpoint keeps them. If the model is of no
            family, a ConfigurationError names the argument.
        vocab_size: Rows of the embedding that are not padding, if the arguments lack it.
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
    if spelled == {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
    }:
        if has_norms:
            return "qwen3_moe" if has_experts else "qwen3"
        if has_experts:
            return "mixtral"
        return "qwen2" if has_qkv_bias else "llama"
    if spelled == {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "add_bias_linear": True,
    }:
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


def command_line(shape: ModelShape) -> list[str]:
    flags = [
        f"--num-layers {shape.num_layers}",
        f"--hidden-size {shape.hidden_size}",
        f"--ffn-hidden-size {shape.ffn_hidden_size}",
        f"--num-attention-heads {shape.num_heads}",
        f"--kv-channels {shape.head_dim}",
        f"--seq-length {shape.max_positions}",
        f"--max-position-embeddings {shape.max_positions}",
        f"--norm-epsilon {shape.norm_eps!r}",
    ]
    if shape.num_query_groups != shape.num_heads:
        flags += ["--group-query-attention", f"--num-query-groups {shape.num_query_groups}"]
    if shape.family == "gpt2":
        flags += ["--normalization LayerNorm", "--position-embedding-type learned_absolute"]
        if not shape.is_gelu_tanh:
            flags += ["--no-bias-gelu-fusion"]
    else:
        flags += ["--normalization RMSNorm", "--position-embedding-type rope"]
        flags += [f"--rotary-base {shape.rotary_base}", "--swiglu", "--disable-bias-linear"]
        if shape.is_rope_scaled:
            flags += ["--use-rope-scaling"]
        if shape.family == "qwen2":
            flags += ["--add-qkv-bias"]
        if shape.family in WITH_QK_NORMS:
            flags += ["--qk-layernorm"]
    if shape.experts is not None:
        flags += [
            f"--num-experts {shape.experts.num}",
            f"--moe-ffn-hidden-size {shape.experts.ffn_hidden_size}",
            f"--moe-router-topk {shape.experts.per_token}",
        ]
        if not shape.experts.is_normalised:
            flags += ["--moe-router-pre-softmax"]
    if not shape.is_tied:
        flags += ["--untie-embeddings-and-output-weights"]
    return flags
