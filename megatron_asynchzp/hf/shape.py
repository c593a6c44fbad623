# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a model is, apart from its weights: family and sizes."""

from dataclasses import dataclass
from typing import Literal

from megatron_asynchzp.errors import ConfigurationError

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
class Experts:
    """The experts that every layer has in place of its MLP, gated as that is.

    num, per_token: how many there are, and how many the router chooses for a token.
    ffn_hidden_size: of each.
    is_normalised: the weights of the chosen are the softmax over their scores, and sum to 1; else
    they are what the softmax over the scores of all gives them.
    """

    num: int
    per_token: int
    ffn_hidden_size: int
    is_normalised: bool


@dataclass(frozen=True)
class ModelShape:
    """A model of one of six families.

    llama: RMSNorm, SwiGLU, rotary positions, no biases. qwen2: the same with biases on q, k and v.
    qwen3: as llama, with an RMSNorm on each head of q and k.
    mixtral: as llama, with experts. qwen3_moe: as qwen3, with experts.
    gpt2: LayerNorm, GELU, learned positions, biases everywhere.

    ffn_hidden_size: of the MLP; with experts no layer has one, and mixtral has that of an expert.
    vocab_size, padded_vocab_size: rows of the embedding in transformers and in Megatron.
    is_vocab_known: without it vocab_size is the padded size, and may count padding.
    is_gelu_tanh: gpt2 only; the tanh approximation in place of the exact function.
    rotary_base, is_rope_scaled: not gpt2; scaled by LLAMA3_SCALING.
    """

    family: Family
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    norm_eps: float
    is_tied: bool
    rotary_base: int = 10000
    is_rope_scaled: bool = False
    is_gelu_tanh: bool = False
    experts: Experts | None = None
    is_vocab_known: bool = True

    def __post_init__(self):
        if self.num_heads % self.num_query_groups:
            raise ConfigurationError(
                f"{self.num_heads} attention heads do not divide into {self.num_query_groups} "
                "query groups"
            )
        if self.family == "gpt2" and self.num_query_groups != self.num_heads:
            raise ConfigurationError("GPT-2 in transformers has no grouped queries")
        # All but Qwen2 and GPT-2 have a head size of their own; Llama's and Mixtral's hidden size
        # must be a multiple of the heads all the same.
        is_free = self.family in WITH_QK_NORMS or (
            self.family in ("llama", "mixtral") and self.hidden_size % self.num_heads == 0
        )
        if self.head_dim * self.num_heads != self.hidden_size and not is_free:
            raise ConfigurationError(
                f"heads of size {self.head_dim} x {self.num_heads} are not the hidden size "
                f"{self.hidden_size}, which {self.family} in transformers requires"
            )
        if self.vocab_size > self.padded_vocab_size:
            raise ConfigurationError(
                f"a vocabulary of {self.vocab_size} is larger than the {self.padded_vocab_size} "
                "rows of the embedding"
            )
        assert (self.experts is not None) == (self.family in WITH_EXPERTS)
        if self.experts is not None:
            self._check(self.experts)

    def _check(self, experts: Experts) -> None:
        if self.family == "mixtral" and not experts.is_normalised:
            raise ConfigurationError(
                "the softmax before the choice of experts (moe_router_pre_softmax = True) does not "
                "map: Mixtral in transformers takes it over the chosen"
            )
        if experts.per_token == 1 and experts.is_normalised:
            raise ConfigurationError(
                "one expert per token, with a weight of 1, does not map: Megatron's router refuses "
                "it"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_query_groups

    def size_of(self, dim: str) -> int:
        """The size of a dimension of one of Megatron's tensors, by the name mapping.py gives it."""
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
    where: str, shape: ModelShape, missing: list[str], foreign: list[str]
) -> str:
    """One line about tensors that lack and tensors that do not belong."""
    differences = []
    for names, verb in ((missing, "lacks"), (foreign, "has, and no rule maps,")):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            differences.append(f"{verb} {', '.join(names[:3])}{rest}")
    return f"{where} is not a {shape.family} model: it {'; it '.join(differences)}"
