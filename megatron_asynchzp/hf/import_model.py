# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a Hugging Face directory to a Megatron checkpoint."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_asynchzp.checkpoint_files.choice import RELEASE, TRACKER
from megatron_asynchzp.checkpoint_files.index import COMMON, COMMON_OBJECT
from megatron_asynchzp.checkpoint_files.small_files import replace_file
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import read_config
from megatron_asynchzp.hf.mapping import TensorRule, rules_of, state_keys
from megatron_asynchzp.hf.output_folder import (
    Progress,
    check_unoccupied,
    complete_or_absent,
    no_progress,
)
from megatron_asynchzp.hf.safetensors_folder import FolderReader
from megatron_asynchzp.hf.shape import ModelShape, describe_difference, write_arguments
from megatron_asynchzp.hf.torch_dist import TensorToWrite, write_checkpoint

# Older directories hold these tensors, which a model computes.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_HEAD = "lm_head.weight"
_EMBEDDINGS = {"model.": "model.embed_tokens.weight", "transformer.": "transformer.wte.weight"}


def import_model(
    load: Path,
    save: Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    progress: Progress = no_progress,
) -> ModelShape:
    """Write the model of a Hugging Face directory as a release checkpoint that Megatron loads.

    Memory holds one tensor, in a few copies. The embedding gets rows of zeros up to a multiple of
    `vocab_multiple`. Raises ConfigurationError, with nothing written, if Megatron does not compute
    the model or `save` is not empty.
    """
    check_unoccupied(save)
    shape = read_config(load, vocab_multiple)
    reader = FolderReader(load)
    shape, stored = _match_names(reader, shape, is_cast=dtype is not None)
    keys = [
        (key, rule) for rule in rules_of(shape) for key in (rule.key, rule.twin) if key is not None
    ]
    num_tensors = sum(math.prod(rule.stack(shape)) for _, rule in keys)
    ticks = iter(progress(range(num_tensors), num_tensors))

    def make(rule: TensorRule, place: tuple[int, ...]) -> Tensor:
        next(ticks, None)
        parts = tuple(reader.read(stored[name]) for name in rule.names_of(place))
        whole = rule.to_megatron(parts, shape)
        return whole.to(dtype or whole.dtype)

    tensors = [
        TensorToWrite(
            key,
            rule.megatron_size(shape),
            # _match_names has refused a directory with other dtypes.
            dtype or reader.info(stored[rule.names_of((0, 0))[0]]).dtype,  # pyright: ignore[reportArgumentType]
            rule.stack(shape),
            partial(make, rule),
        )
        for key, rule in keys
    ]
    with complete_or_absent(save) as folder:
        objects = _objects(shape)
        write_checkpoint(folder / RELEASE, tensors, objects)
        # Stock megatron-core 0.18 looks for it here; later versions read either.
        torch.save(objects[COMMON_OBJECT], folder / RELEASE / COMMON)
        replace_file(folder / TRACKER, RELEASE.encode())
        next(ticks, None)
    return shape


def _match_names(
    reader: FolderReader, shape: ModelShape, is_cast: bool
) -> tuple[ModelShape, dict[str, str]]:
    """Return the directory's name of each tensor, and the shape, untied if the two weights differ.

    As transformers does, accept names that lack the outer module, or have it wrongly. Raise
    ConfigurationError unless the tensors are exactly those of the rules, in their sizes, and, if
    they are not cast, of equal dtype.
    """
    outer = "transformer." if shape.family == "gpt2" else "model."
    wanted = _wanted(shape)
    known = {*wanted, _HEAD}
    stored: dict[str, str] = {}
    foreign = []
    for name in sorted(reader.names):
        if name.endswith(_COMPUTED):
            continue
        spellings = (name, name.removeprefix(outer), outer + name)
        plain = next((spelling for spelling in spellings if spelling in known), None)
        if plain is None:
            foreign.append(name)
        elif (first := stored.setdefault(plain, name)) != name:
            raise ConfigurationError(f"the directory has {plain} twice: {first} and {name}")
    if shape.is_tied and _HEAD in stored:
        embedding = _EMBEDDINGS[outer]
        if embedding not in stored:
            stored[embedding] = stored[_HEAD]
        elif not _are_equal(*(reader.read(stored[key]) for key in (embedding, _HEAD))):
            shape = replace(shape, is_tied=False)
            wanted = _wanted(shape)
    if (missing := sorted(set(wanted) - set(stored))) or foreign:
        raise ConfigurationError(describe_difference("the directory", shape, missing, foreign))
    dtypes = set()
    for name, size in wanted.items():
        info = reader.info(stored[name])
        if info.size != size:
            raise ConfigurationError(
                f"{name} has size {list(info.size)}, but by config.json it has {list(size)}"
            )
        if info.dtype is None or (info.dtype == torch.float64 and not is_cast):
            raise ConfigurationError(
                f"{name} is in {reader.stored_dtype(stored[name])}: weights are in fp32, bf16 or "
                "fp16; --dtype casts F64, and of quantised weights transformers saves others"
            )
        dtypes.add(info.dtype)
    if len(dtypes) > 1 and not is_cast:
        mixed = ", ".join(sorted(map(str, dtypes)))
        raise ConfigurationError(f"the directory mixes {mixed}; choose one with --dtype")
    return shape, stored


def _wanted(shape: ModelShape) -> dict[str, torch.Size]:
    return {
        name: size
        for rule in rules_of(shape)
        for place in rule.places(shape)
        for name, size in zip(rule.names_of(place), rule.hf_sizes(shape), strict=True)
    }


def _are_equal(embedding: Tensor, head: Tensor) -> bool:
    if embedding.dtype != head.dtype:
        embedding, head = embedding.float(), head.float()
    return torch.equal(embedding, head)


def _objects(shape: ModelShape) -> dict[str, Any]:
    common = {
        "args": write_arguments(shape),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    return {COMMON_OBJECT: common, **dict.fromkeys(state_keys(shape))}
