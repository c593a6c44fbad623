# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of a checkpoint with the model that is to load it, before anything of the
model is written to. Must not load anything.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_asynchzp.checkpoint_files.inventory import Tensor

# Arguments that Megatron refuses to differ, and then those that explain other tensors.
_FIXED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
_SHAPING = (
    *_FIXED,
    "vocab_size",
    "ffn_hidden_size",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "max_position_embeddings",
    "position_embedding_type",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "normalization",
    "qk_layernorm",
    "multi_latent_attention",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "optimizer",
)


def find_different_argument(saved: Any, args: Namespace, is_finetuning: bool) -> str | None:
    """The first argument that Megatron would refuse to differ, with both values.

    The vocabulary is one of ours: Megatron pads and cuts embeddings without a word.
    """
    names = ("vocab_size",) if is_finetuning else (*_FIXED, "vocab_size")
    return _first_difference(names, saved, args)


def _first_difference(names: Iterable[str], saved: Any, args: Namespace) -> str | None:
    for name in names:
        was, now = getattr(saved, name, None), getattr(args, name, None)
        if was is not None and now is not None and was != now:
            return f"--{name.replace('_', '-')} is {was} in the checkpoint and {now} in this run"
    return None


def find_different_tensor(
    tensors: Mapping[str, Tensor], sharded_state_dict: Any, may_miss: bool
) -> str | None:
    """The first tensor of the run that the checkpoint does not have, or has in another shape.

    may_miss: the run was told to go on without tensors that the checkpoint lacks.
    """
    for wanted in _wanted_tensors(sharded_state_dict):
        found = tensors.get(wanted.key)
        if found is None:
            if not may_miss:
                return f"it has no tensor {wanted.key}"
        elif found.shape != tuple(wanted.global_shape) and not wanted.allow_shape_mismatch:
            now = "x".join(map(str, wanted.global_shape))
            was = "x".join(map(str, found.shape))
            return f"tensor {wanted.key} is {was} in the checkpoint and {now} in this run"
    return None


def _wanted_tensors(sharded_state_dict: Any) -> Iterable[ShardedTensor]:
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensorFactory):
            yield from _wanted_tensors({"built": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value


def explain(difference: str, saved: Any, args: Namespace) -> str:
    """The difference, after the argument it may come from."""
    cause = _first_difference(_SHAPING, saved, args)
    return f"{cause} ({difference})" if cause else difference
