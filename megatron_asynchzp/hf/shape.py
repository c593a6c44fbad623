# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Family and sizes of a model."""

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

    def _check(self, experts: ExpertsShape) -> None:
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
