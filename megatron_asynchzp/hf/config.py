# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes config.json of transformers, and refuses models that Megatron cannot compute."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.safetensors_folder import read_json
from megatron_asynchzp.hf.shape import LLAMA3_SCALING, WITH_EXPERTS, ExpertsShape, ModelShape

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Spellings of the tanh approximation in transformers.
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")

# Entry of config.json -> values with which Megatron computes the model, by family.
_PLAIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"hidden_act": ("silu",), "use_sliding_window": (False,)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    "mixtral": {"hidden_act": ("silu",), "sliding_window": (None,)},
    "qwen3_moe": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    "gpt2": {
        "activation_function": ("gelu", *_GELU_TANH),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}


def write_config(shape: ModelShape, folder: Path, dtype: torch.dtype) -> None:
    _check_transformers()
    from transformers import AutoConfig

    entries: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.is_tied,
        "dtype": dtype,
        # A tokenizer has them; a checkpoint does not.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.family == "gpt2":
        entries["n_inner"] = shape.ffn_hidden_size
        entries["layer_norm_epsilon"] = shape.norm_eps
        entries["activation_function"] = "gelu_new" if shape.is_gelu_tanh else "gelu"
    else:
        entries["intermediate_size"] = shape.ffn_hidden_size
        entries["num_key_value_heads"] = shape.num_query_groups
        entries["rms_norm_eps"] = shape.norm_eps
        entries["rope_parameters"] = _rope_parameters(shape)
        if shape.family != "qwen2":
            entries["head_dim"] = shape.head_dim
    if shape.experts is not None:
        entries["num_local_experts"] = shape.experts.num
        entries["num_experts_per_tok"] = shape.experts.per_token
    if shape.experts is not None and shape.family == "qwen3_moe":
        entries["moe_intermediate_size"] = shape.experts.ffn_hidden_size
        entries["norm_topk_prob"] = shape.experts.is_normalised
    AutoConfig.for_model(shape.family, **entries).save_pretrained(folder)
    if shape.family != "gpt2":
        _spell_for_transformers_4(folder / "config.json", shape)


def _rope_parameters(shape: ModelShape) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **LLAMA3_SCALING}
    kind = scaling if shape.is_rope_scaled else {"rope_type": "default"}
    return {"rope_theta": float(shape.rotary_base), **kind}


def _spell_for_transformers_4(path: Path, shape: ModelShape) -> None:
    entries = json.loads(path.read_text())
    entries["rope_theta"] = float(shape.rotary_base)
    if shape.is_rope_scaled:
        entries["rope_scaling"] = {"rope_type": "llama3", **LLAMA3_SCALING}
    if shape.family == "qwen3_moe":
        entries["num_experts"] = entries["num_local_experts"]
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")


def _check_transformers() -> None:
    have = version("transformers")
    if int(have.partition(".")[0]) < 5:
        raise ConfigurationError(
            f"transformers {have} is installed, and a conversion needs 5 or later, which reads "
            "and writes config.json otherwise; install 'transformers>=5'"
        )


def read_config(folder: Path, vocab_multiple: int) -> ModelShape:
    """Read the shape of the model that `folder` holds.

    Megatron pads the embedding to a multiple of `vocab_multiple` rows. ConfigurationError names an
    entry that Megatron does not compute.
    """
    _check_transformers()
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no config.json, so it is not a Hugging Face model")
    entries = read_json(path)
    try:
        return _read_shape(folder, entries, vocab_multiple)
    except ConfigurationError:
        raise
    except Exception as error:  # transformers and we assume much about the entries
        raise ConfigurationError(
            f"{path} is not a model's configuration: {type(error).__name__}: {one_line(error)}"
        ) from error


def _read_shape(folder: Path, entries: dict[str, Any], vocab_multiple: int) -> ModelShape:
    from transformers import AutoConfig

    family = entries.get("model_type")
    if entries.get("quantization_config") is not None:
        raise ConfigurationError("quantization_config does not map: quantised models are refused")
    if family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigurationError(f"model_type = {family} does not map (only {known} do)")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, allowed in _PLAIN[family].items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ConfigurationError(
                f"{name} = {value} does not map to Megatron (only {allowed[0]} does)"
            )
    vocab = config.vocab_size
    heads, hidden = config.num_attention_heads, config.hidden_size
    common: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "vocab_size": vocab,
        "padded_vocab_size": -(-vocab // vocab_multiple) * vocab_multiple,
        "max_positions": config.max_position_embeddings,
        "is_tied": config.tie_word_embeddings,
    }
    if family == "gpt2":
        return ModelShape(
            family="gpt2",
            ffn_hidden_size=config.n_inner or 4 * hidden,
            num_query_groups=heads,
            head_dim=hidden // heads,
            norm_eps=config.layer_norm_epsilon,
            is_gelu_tanh=config.activation_function in _GELU_TANH,
            **common,
        )
    base, is_scaled = _read_rope(config.rope_parameters)
    experts = None
    if family in WITH_EXPERTS:
        is_mixtral = family == "mixtral"
        experts = ExpertsShape(
            num=config.num_local_experts,
            per_token=config.num_experts_per_tok,
            ffn_hidden_size=(
                config.intermediate_size if is_mixtral else config.moe_intermediate_size
            ),
            is_normalised=is_mixtral or config.norm_topk_prob,
        )
    return ModelShape(
        family=family,
        ffn_hidden_size=config.intermediate_size,
        num_query_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        norm_eps=config.rms_norm_eps,
        rotary_base=base,
        is_rope_scaled=is_scaled,
        experts=experts,
        **common,
    )


def _read_rope(parameters: dict[str, Any]) -> tuple[int, bool]:
    base, kind = parameters["rope_theta"], parameters.get("rope_type", "default")
    if base != int(base):
        raise ConfigurationError(
            f"rope_theta = {base} does not map: --rotary-base is a whole number"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError("partial_rotary_factor does not map: it must be 1")
    if kind == "default":
        return int(base), False
    scaling = {name: parameters.get(name) for name in LLAMA3_SCALING}
    if kind != "llama3" or scaling != LLAMA3_SCALING:
        raise ConfigurationError(
            f"rope_type = {kind} with {scaling} does not map: Megatron 0.19 computes default and "
            f"llama3 with {LLAMA3_SCALING} only"
        )
    return int(base), True
