# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the argument that explains why a checkpoint and a run do not share a tensor."""

import re
from argparse import Namespace
from collections.abc import Collection
from typing import Any

# Arguments, and the tensors that come, go or change their shape with them. Those that set others by
# default stand before them.
_MLP = r"\b(pre_mlp_layernorm|mlp)\b"
_MATRICES = r"linear_fc[12]\.(weight|bias)$"
_NORMS_OF_LATENT_ATTENTION = r"\b(input_layernorm|pre_mlp_layernorm|linear_fc1\.layer_norm)"
_NAMES_OF_LAYERS = r"^decoder\.layers\."  # with numbers, where layers are of two kinds
_CAUSES = (
    ("hybrid_layer_pattern", r"^(decoder|mtp)\."),
    ("num_layers", r"^decoder\.layers\."),
    ("hidden_size", r""),
    ("mtp_num_layers", r"^mtp\."),
    ("position_embedding_type", r"\bposition_embeddings\b"),
    ("max_position_embeddings", r"\bposition_embeddings\b"),
    ("untie_embeddings_and_output_weights", r"\boutput_layer\b"),
    ("normalization", r"norm[._]bias$"),
    ("add_bias_linear", r"(?<!norm)\.bias$"),
    ("add_qkv_bias", r"\blinear_qkv\.bias$"),
    ("multi_latent_attention", rf"\bself_attention\b|{_NORMS_OF_LATENT_ATTENTION}"),
    ("experimental_attention_variant", r"\bself_attention\b"),
    ("qk_layernorm", r"\b[qk]_layernorm\b"),
    ("num_attention_heads", r"\bself_attention\b"),
    ("group_query_attention", r"\blinear_qkv\b"),
    ("num_query_groups", r"\blinear_qkv\b"),
    ("attention_output_gate", r"\blinear_qkv\b"),
    ("kv_channels", r"\b(linear_qkv|linear_proj|[qk]_layernorm)\b"),
    ("q_lora_rank", r"\blinear_q_|\bq_layernorm\b"),
    ("kv_lora_rank", r"\blinear_kv_|\bkv_layernorm\b"),
    ("qk_head_dim", r"\blinear_(q|kv)_"),
    ("qk_pos_emb_head_dim", r"\blinear_(q|kv)_"),
    ("v_head_dim", r"\blinear_(kv_|proj\b)"),
    ("softmax_type", r"\bsoftmax_offset\b"),
    ("num_experts", _MLP),
    ("moe_shared_expert_intermediate_size", r"\bshared_experts\b"),
    ("moe_shared_expert_gate", r"\bshared_experts\.gate"),
    ("moe_router_enable_expert_bias", r"\bexpert_bias\b"),
    ("moe_latent_size", r"\bmlp\b"),
    ("swiglu", _MATRICES),
    ("quick_geglu", _MATRICES),
    ("moe_ffn_hidden_size", rf"\bexperts\b.*{_MATRICES}"),
    ("ffn_hidden_size", _MATRICES),
    ("num_experts", _NAMES_OF_LAYERS),
    ("moe_layer_freq", _NAMES_OF_LAYERS),
)
CAUSES = tuple(dict.fromkeys(name for name, _ in _CAUSES))
# What means something only where another argument is set.
_MATTERS_WITH = {
    "num_query_groups": "group_query_attention",
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        "multi_latent_attention",
    ),
    **dict.fromkeys((name for name in CAUSES if name.startswith("moe_")), "num_experts"),
}
# Flags that switch off what their arguments say.
_SWITCHES_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
}


def flag_of(name: str) -> str:
    return _SWITCHES_OFF.get(name, "--" + name.replace("_", "-"))


def describe(name: str, saved: Any, args: Namespace) -> str:
    was, now = (_shown(name, getattr(arguments, name, None)) for arguments in (saved, args))
    return f"{flag_of(name)} is {was} in the checkpoint and {now} in this run"


def _shown(name: str, value: Any) -> Any:
    if name in _SWITCHES_OFF:
        return not value
    return "not given" if value is None else value


def differing(saved: Any, args: Namespace) -> list[str]:
    """Return the arguments that explain tensors and differ between checkpoint and run."""
    # saved has the arguments after training: Megatron sets some that the user never gave.
    return [
        name
        for name in CAUSES
        if hasattr(saved, name) and hasattr(args, name)
        if _meaning(name, saved) != _meaning(name, args)
    ]


def _meaning(name: str, args: Any) -> Any:
    value, condition = getattr(args, name), _MATTERS_WITH.get(name)
    if condition is not None and not getattr(args, condition, None):
        return None
    if name == "moe_ffn_hidden_size" and value == args.ffn_hidden_size:
        return None  # Megatron's default
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(layer % value == 0) for layer in range(args.num_layers)]
    if name == "hybrid_layer_pattern" and value is not None:
        return value.replace("|", "")  # where the pipeline is cut
    return value or None


def cause_of(tensor: str, names: Collection[str]) -> str | None:
    """Return the first of these arguments with which the tensor of this name comes or changes."""
    return next((name for name, kind in _CAUSES if name in names and re.search(kind, tensor)), None)
