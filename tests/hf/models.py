# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with random weights, and the shapes they have."""

from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_asynchzp.hf.shape import LLAMA3_SCALING, ExpertsShape, ModelShape

VOCABULARY, POSITIONS = 101, 32

_SIZES = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
# fmt: off
_LLAMA_SIZES: dict[str, Any] = {
    **_SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
}
_EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
_QWEN3_EXPERTS = {
    **_LLAMA_SIZES, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32,
}
# fmt: on
_GPT2_SIZES = {**_SIZES, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}


def configs() -> dict[str, transformers.PretrainedConfig]:
    """Every kind of model that maps, by name."""
    return {
        "llama": transformers.LlamaConfig(**_LLAMA_SIZES, num_key_value_heads=2),
        "llama-tied-scaled-rope": transformers.LlamaConfig(
            **_LLAMA_SIZES, num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=_SCALED
        ),
        "llama-free-head-size": transformers.LlamaConfig(
            **_LLAMA_SIZES, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-3
        ),
        "qwen2": transformers.Qwen2Config(**_LLAMA_SIZES, num_key_value_heads=2),
        "qwen3": transformers.Qwen3Config(**_LLAMA_SIZES, num_key_value_heads=2, head_dim=32),
        "mixtral": transformers.MixtralConfig(**_LLAMA_SIZES, **_EXPERTS, num_local_experts=4),
        "qwen3_moe": transformers.Qwen3MoeConfig(**_QWEN3_EXPERTS, norm_topk_prob=True),
        "qwen3_moe-tied-softmax-of-all": transformers.Qwen3MoeConfig(
            **{**_QWEN3_EXPERTS, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
        "gpt2": transformers.GPT2Config(**_GPT2_SIZES, activation_function="gelu"),
        "gpt2-untied": transformers.GPT2Config(
            **_GPT2_SIZES, activation_function="gelu", n_inner=80, tie_word_embeddings=False
        ),
    }


def random_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """The model with every weight, also norms and biases, drawn at random; dropout off."""
    model = transformers.AutoModelForCausalLM.from_config(configs()[name]).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(0.1 * noise if param.dim() > 1 else 0.5 + 0.3 * noise)
    return model


def load_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def logits_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    """[2, POSITIONS, VOCABULARY]"""
    with torch.no_grad():
        return model(tokens()).logits


def tokens() -> torch.Tensor:
    return (torch.arange(2 * POSITIONS).view(2, POSITIONS) * 17 + 3) % VOCABULARY


def shapes() -> dict[str, ModelShape]:
    """The shapes of configs(), by name."""
    # fmt: off
    sizes = {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_heads": 4, "head_dim": 16,
        "vocab_size": VOCABULARY, "padded_vocab_size": 128, "max_positions": POSITIONS,
    }
    # fmt: on
    llama = {**sizes, "family": "llama", "norm_eps": 1e-6}
    gpt2 = {**sizes, "family": "gpt2", "norm_eps": 1e-5, "num_query_groups": 4}
    return {
        "llama": ModelShape(**llama, num_query_groups=2, is_tied=False),
        "llama-tied-scaled-rope": ModelShape(
            **llama, num_query_groups=4, is_tied=True, rotary_base=500000, is_rope_scaled=True
        ),
        "llama-free-head-size": ModelShape(
            **{**llama, "head_dim": 32, "norm_eps": 1e-3}, num_query_groups=1, is_tied=False
        ),
        "qwen2": ModelShape(**{**llama, "family": "qwen2"}, num_query_groups=2, is_tied=False),
        "qwen3": ModelShape(
            **{**llama, "family": "qwen3", "head_dim": 32}, num_query_groups=2, is_tied=False
        ),
        "mixtral": ModelShape(
            **{**llama, "family": "mixtral", "norm_eps": 1e-5},
            num_query_groups=2,
            is_tied=False,
            rotary_base=1000000,
            experts=ExpertsShape(4, 2, 96, is_normalised=True),
        ),
        "qwen3_moe": ModelShape(
            **{**llama, "family": "qwen3_moe", "head_dim": 32},
            num_query_groups=2,
            is_tied=False,
            experts=ExpertsShape(4, 2, 48, is_normalised=True),
        ),
        "qwen3_moe-tied-softmax-of-all": ModelShape(
            **{**llama, "family": "qwen3_moe"},
            num_query_groups=2,
            is_tied=True,
            experts=ExpertsShape(8, 3, 48, is_normalised=False),
        ),
        "gpt2": ModelShape(**{**gpt2, "ffn_hidden_size": 256}, is_tied=True),
        "gpt2-untied": ModelShape(**{**gpt2, "ffn_hidden_size": 80}, is_tied=False),
    }


NAMES = tuple(shapes())
