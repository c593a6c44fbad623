# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a checkpoint with the model before any load."""

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_asynchzp.checkpoint_files.index import IndexReader, read_common_state
from megatron_asynchzp.checkpoint_files.peers import Peers, on_first
from megatron_asynchzp.mcore.checkpoint.causes import cause_of, describe, differing

# Arguments that Megatron refuses to differ.
FIXED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
_LENIENT = ("ignore_all", "log_all", "return_all")
_OPTIMIZER = "optimizer."
_STATE = re.compile(r"optimizer\.state\.(?P<kind>[^.]+)\.(?P<tensor>.*)")
_MAIN_PARAM = ("fp32_param", "param")
_NEW_MOMENTS = "add --no-load-optim, which starts with new moments"
NO_OPTIMIZER = f"holds no state of an optimizer (--no-save-optim); {_NEW_MOMENTS}"
"""What is said of a checkpoint without one."""

Shapes = Mapping[str, tuple[int, ...]]


class Difference(NamedTuple):
    """A tensor that checkpoint and run do not share, and why, for the user."""

    tensor: str
    detail: str


class Facts(NamedTuple):
    """A checkpoint's arguments (None: none), its tensors, and all its names."""

    saved: Any
    shapes: Shapes
    names: frozenset[str]


def read_facts(iteration_dir: str, peers: Peers) -> Facts:
    return on_first(peers, lambda: _read_facts(iteration_dir))


def compare(
    args: Namespace, saved: Any, shapes: Shapes, wanted: Iterable[ShardedTensor], peers: Peers
) -> str | None:
    """Return why a checkpoint cannot be loaded, the same on all ranks; None if it fits.

    Collective. wanted are this rank's entries. The vocabulary is compared because Megatron pads and
    cuts embeddings silently.
    """
    if name := _find_fixed(args, saved):
        return f"is of another model: {describe(name, saved, args)}"
    is_lenient = args.dist_ckpt_strictness in _LENIENT
    mine = _find_unlike(shapes, wanted, may_miss=is_lenient)
    if difference := next((reported for reported in peers.gather(mine) if reported), None):
        return _explain(difference, args, saved, shapes)
    # With --finetune a part of a model may be taken over.
    return None if is_lenient or args.finetune else _find_unread(args, saved, shapes, wanted, peers)


def _read_facts(iteration_dir: str) -> Facts:
    entries = IndexReader(iteration_dir).read_metadata().state_dict_metadata
    shapes = {
        name: tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return Facts(read_common_state(iteration_dir).get("args"), shapes, frozenset(entries))


def _find_fixed(args: Namespace, saved: Any) -> str | None:
    for name in ("vocab_size",) if args.finetune else (*FIXED, "vocab_size"):
        was, now = getattr(saved, name, None), getattr(args, name, None)
        if was is not None and now is not None and was != now:
            is_derived = name == "num_layers" and getattr(args, "hybrid_layer_pattern", None)
            return "hybrid_layer_pattern" if is_derived else name
    return None


def _find_unlike(
    shapes: Shapes, wanted: Iterable[ShardedTensor], may_miss: bool
) -> Difference | None:
    """Find the first tensor that differs in shape or, unless may_miss, is not in the checkpoint."""
    for entry in wanted:
        was, now = shapes.get(entry.key), tuple(entry.global_shape)
        if was is None and not may_miss:
            return Difference(entry.key, f"it has no tensor {entry.key}")
        if was not in (None, now) and not entry.allow_shape_mismatch:
            was, now = ("x".join(map(str, shape)) for shape in (was, now))
            return Difference(
                entry.key, f"tensor {entry.key} is {was} in the checkpoint and {now} in this run"
            )
    return None


def _explain(difference: Difference, args: Namespace, saved: Any, shapes: Shapes) -> str:
    tensor, detail = difference
    if match := _STATE.fullmatch(tensor):
        if match["tensor"] in shapes:
            return _explain_state(match["kind"], detail, args, saved, shapes)
        tensor = match["tensor"]
    name = cause_of(tensor, differing(saved, args))
    return f"is of another model: {f'{describe(name, saved, args)} ({detail})' if name else detail}"


def _explain_state(kind: str, detail: str, args: Namespace, saved: Any, shapes: Shapes) -> str:
    """Explain an unlike tensor of the optimizer, whose parameter's values the checkpoint has."""
    if not any(key.startswith(_OPTIMIZER) for key in shapes):
        return NO_OPTIMIZER
    names = ("bf16", "fp16") if kind in _MAIN_PARAM else ("optimizer", "sgd_momentum")
    for name in names:
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name):
            return f"is of another optimizer: {describe(name, saved, args)} ({detail})"
    kinds = {match["kind"] for key in shapes if (match := _STATE.fullmatch(key))}
    if kinds <= set(_MAIN_PARAM):
        return (
            f"was saved before the first step of its optimizer and holds no moments; {_NEW_MOMENTS}"
        )
    return f"is of another model: {detail}"


def _find_unread(
    args: Namespace, saved: Any, shapes: Shapes, wanted: Iterable[ShardedTensor], peers: Peers
) -> str | None:
    if not (names := differing(saved, args)):
        return None
    mine = {entry.key for entry in wanted}
    unread = {key for key in shapes if not key.startswith(_OPTIMIZER) and cause_of(key, names)}
    for others in peers.gather(unread - mine):
        unread &= others
    if not unread:
        return None
    tensor = min(unread)
    name = cause_of(tensor, names)
    return (
        f"is of another model: {describe(str(name), saved, args)} (this run has no tensor {tensor};"
        " --dist-ckpt-strictness log_all loads the rest)"
    )


def wanted_tensors(sharded_state_dict: Any) -> Iterable[ShardedTensor]:
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensorFactory):
            yield from wanted_tensors({"built": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value
