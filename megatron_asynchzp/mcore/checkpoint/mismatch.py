# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of a checkpoint with the model that is to load it, before anything of the
model is written to. Must not load anything.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_asynchzp.checkpoint_files.peers import Peers, on_first

# Arguments that Megatron refuses to differ, and then those that explain other tensors.
_FIXED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
# fmt: off
_SHAPING = (
    *_FIXED, "vocab_size", "ffn_hidden_size", "num_query_groups", "group_query_attention",
    "kv_channels", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_layer_freq", "max_position_embeddings", "position_embedding_type", "swiglu",
    "add_bias_linear", "add_qkv_bias", "normalization", "qk_layernorm", "multi_latent_attention",
    "untie_embeddings_and_output_weights", "padded_vocab_size", "optimizer",
)
# fmt: on

Shapes = Mapping[str, tuple[int, ...]]


def find_difference(
    args: Namespace, iteration_dir: str, sharded_state_dict: Any, peers: Peers
) -> str | None:
    """The first argument or tensor that differs, with both values; the same on all ranks.
    Collective.

    The vocabulary is an argument of ours: Megatron pads and cuts embeddings without a word.
    """
    saved, shapes = on_first(peers, lambda: _read_facts(iteration_dir))
    fixed = ("vocab_size",) if args.finetune else (*_FIXED, "vocab_size")
    if difference := _find_different_argument(fixed, saved, args):
        return difference
    may_miss = args.dist_ckpt_strictness in ("ignore_all", "log_all", "return_all")
    mine = _find_different_tensor(shapes, sharded_state_dict, may_miss)
    difference = next((one for one in peers.gather(mine) if one), None)
    cause = difference and _find_different_argument(_SHAPING, saved, args)
    return f"{cause} ({difference})" if cause else difference


def _read_facts(iteration_dir: str) -> tuple[Any, Shapes]:
    entries = FileSystemReader(iteration_dir).read_metadata().state_dict_metadata
    shapes = {
        name: tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return load_common_state_dict(iteration_dir).get("args"), shapes


def _find_different_argument(names: Iterable[str], saved: Any, args: Namespace) -> str | None:
    for name in names:
        was, now = getattr(saved, name, None), getattr(args, name, None)
        if was is not None and now is not None and was != now:
            return f"--{name.replace('_', '-')} is {was} in the checkpoint and {now} in this run"
    return None


def _find_different_tensor(shapes: Shapes, sharded_state_dict: Any, may_miss: bool) -> str | None:
    """The first tensor of the run that the checkpoint does not have, or has in another shape.

    may_miss: the run goes on without tensors that the checkpoint lacks.
    """
    for wanted in _wanted_tensors(sharded_state_dict):
        was, now = shapes.get(wanted.key), tuple(wanted.global_shape)
        if was is None and not may_miss:
            return f"it has no tensor {wanted.key}"
        if was not in (None, now) and not wanted.allow_shape_mismatch:
            was, now = ("x".join(map(str, shape)) for shape in (was, now))
            return f"tensor {wanted.key} is {was} in the checkpoint and {now} in this run"
    return None


def _wanted_tensors(sharded_state_dict: Any) -> Iterable[ShardedTensor]:
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensorFactory):
            yield from _wanted_tensors({"built": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value
