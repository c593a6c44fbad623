# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the way from a Hugging Face directory to a Megatron checkpoint."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_asynchzp.checkpoint_files.choice import RELEASE, TRACKER
from megatron_asynchzp.checkpoint_files.common_state import COMMON, COMMON_OBJECT
from megatron_asynchzp.checkpoint_files.small_files import replace_file
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import read_config
from megatron_asynchzp.hf.mapping import TensorRule, rules_of, state_keys
from megatron_asynchzp.hf.megatron_arguments import write_arguments
from megatron_asynchzp.hf.output_folder import complete_or_absent, refuse_occupied
from megatron_asynchzp.hf.progress import Progress, no_progress
from megatron_asynchzp.hf.safetensors_folder import FolderReader
from megatron_asynchzp.hf.shape import ModelShape, describe_difference
from megatron_asynchzp.hf.torch_dist import TensorToWrite, write_checkpoint

# Tensors that older directories hold, and that a model computes itself.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def import_model(
    load: Path,
    save: Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    progress: Progress = no_progress,
) -> ModelShape:
    """Write the model of a Hugging Face directory as a release checkpoint that Megatron loads.

    load: the directory.
    save: Megatron's --load folder to be.
    dtype: cast to it; by default every tensor keeps its own.
    vocab_multiple: the embedding is padded with zero rows to a multiple of this.

    Memory holds one tensor, in a few copies. Raises ConfigurationError for a model that does not
    map and for a `save` that is not empty; then nothing is written.
    """
    refuse_occupied(save)
    shape = read_config(load, vocab_multiple)
    reader = FolderReader(load)
    prefix = _match_names(reader, shape, is_cast=dtype is not None)
    keys = [
        (key, rule) for rule in rules_of(shape) for key in (rule.key, rule.twin) if key is not None
    ]
    num_tensors = sum(math.prod(rule.stack(shape)) for _, rule in keys)
    ticks = iter(progress(range(num_tensors), num_tensors))

    def make(rule: TensorRule, place: tuple[int, ...]) -> Tensor:
        next(ticks, None)
        parts = tuple(reader.read(prefix(name)) for name in rule.names_of(place))
        whole = rule.to_megatron(parts, shape)
        return whole.to(dtype or whole.dtype)

    tensors = [
        TensorToWrite(
            key,
            rule.megatron_size(shape),
            # _match_names has refused a directory with other dtypes.
            dtype or reader.info(prefix(rule.names_of((0, 0))[0])).dtype,  # pyright: ignore[reportArgumentType]
            rule.stack(shape),
            partial(make, rule),
        )
        for key, rule in keys
    ]
    with complete_or_absent(save) as folder:
        objects = dict(_objects(shape))
        write_checkpoint(folder / RELEASE, tensors, objects)
        # Here stock megatron-core 0.18 looks for it; later versions read either.
        torch.save(objects[COMMON_OBJECT], folder / RELEASE / COMMON)
        replace_file(folder / TRACKER, RELEASE.encode())
        next(ticks, None)
    return shape


def _match_names(reader: FolderReader, shape: ModelShape, is_cast: bool) -> Callable[[str], str]:
    """The function from a rule's name to the directory's. Raises ConfigurationError, one line,
    unless the directory's tensors are exactly those of the rules, in their sizes and of one dtype
    (of any where they will be cast)."""
    # GPT-2's first directories hold the model without the head that transformers puts around it.
    is_bare = shape.family == "gpt2" and not any(n.startswith("transformer.") for n in reader.names)

    def prefix(name: str) -> str:
        return name.removeprefix("transformer.") if is_bare else name

    wanted = {
        prefix(name): size
        for rule in rules_of(shape)
        for place in rule.places(shape)
        for name, size in zip(rule.names_of(place), rule.hf_sizes(shape), strict=True)
    }
    there = {name for name in reader.names if not name.endswith(_COMPUTED)}
    if shape.is_tied:
        there.discard("lm_head.weight")  # a copy of the embedding
    missing, foreign = sorted(set(wanted) - reader.names), sorted(there - set(wanted))
    if missing or foreign:
        raise ConfigurationError(describe_difference("the directory", shape, missing, foreign))
    dtypes = set()
    for name, size in wanted.items():
        info = reader.info(name)
        if info.size != size:
            raise ConfigurationError(
                f"{name} has size {list(info.size)}, but by config.json it has {list(size)}"
            )
        if info.dtype is None:
            raise ConfigurationError(
                f"{name} is neither fp32, bf16 nor fp16: quantised models do not map"
            )
        dtypes.add(info.dtype)
    if len(dtypes) > 1 and not is_cast:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ConfigurationError(f"the directory mixes {found}; choose one with --dtype")
    return prefix


def _objects(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    """What a checkpoint keeps beside tensors, by Megatron's key."""
    yield (
        COMMON_OBJECT,
        {
            "args": write_arguments(shape),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        },
    )
    yield from ((key, None) for key in state_keys(shape))
