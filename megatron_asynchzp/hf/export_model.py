# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the way from a Megatron checkpoint to a Hugging Face directory."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import write_config
from megatron_asynchzp.hf.mapping import OTHER_KEYS, TensorRule, rules_of
from megatron_asynchzp.hf.megatron_arguments import read_arguments
from megatron_asynchzp.hf.output_folder import complete_or_absent, refuse_occupied
from megatron_asynchzp.hf.progress import Progress, no_progress
from megatron_asynchzp.hf.safetensors_folder import TensorInfo, write_folder
from megatron_asynchzp.hf.shape import ModelShape, describe_difference
from megatron_asynchzp.hf.torch_dist import TensorReader, find_checkpoint, read_arguments_of

MAX_FILE_NBYTES = 5 * 10**9

# What a checkpoint keeps beside the model.
_NOT_THE_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state", "asynchzp.")


def export_model(
    load: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    level: VerifyLevel = VerifyLevel.FULL,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress = no_progress,
) -> ModelShape:
    """Write the model of a Megatron checkpoint as a Hugging Face directory.

    load: Megatron's --load folder.
    step: its iteration, by default the newest that is intact.
    level: what of its data is read to judge that.
    dtype: cast to it; by default every tensor keeps its own.
    vocab_size: rows of the embedding that are no padding, needed where the checkpoint lacks it.

    Memory holds one tensor, in a few copies. Raises ConfigurationError for a model that does not
    map and for an `output` that is not empty; then nothing is written.
    """
    refuse_occupied(output)
    checkpoint = find_checkpoint(load, step, level)
    shape = read_arguments(read_arguments_of(checkpoint), vocab_size)
    reader = TensorReader(checkpoint)
    keys = _match_keys(reader, shape)
    jobs = list(_in_order(shape))

    def target_dtype(rule: TensorRule) -> torch.dtype:
        return dtype or reader.tensors[keys[rule.key]].properties.dtype

    infos = {
        name: TensorInfo(size, target_dtype(rule))
        for rule, layer in jobs
        for name, size in zip(rule.names_of(layer), rule.hf_sizes(shape), strict=True)
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for rule, layer in progress(jobs, len(jobs)):
            whole = reader.read(keys[rule.key], layer if rule.is_per_layer else None)
            pieces = rule.to_hf(whole.to(target_dtype(rule)), shape)
            yield from zip(rule.names_of(layer), pieces, strict=True)

    with complete_or_absent(output) as folder:
        write_config(shape, folder, target_dtype(rules_of(shape)[0]))
        write_folder(folder, infos, tensors(), max_file_nbytes)
    return shape


def _in_order(shape: ModelShape) -> Iterator[tuple[TensorRule, int]]:
    """Every rule with every layer, so that a layer's tensors come together."""
    rules = rules_of(shape)
    yield from ((rule, 0) for rule in rules if not rule.is_per_layer)
    for layer in range(shape.num_layers):
        yield from ((rule, layer) for rule in rules if rule.is_per_layer)


def _match_keys(reader: TensorReader, shape: ModelShape) -> dict[str, str]:
    """The checkpoint's key of each rule. Raises ConfigurationError, one line, unless the model's
    tensors are exactly those of the rules, in their sizes."""
    stored = {
        key: it.size
        for key, it in reader.tensors.items()
        if not key.startswith(_NOT_THE_MODEL) and "_extra_state" not in key
    }
    found, missing = {}, []
    for rule in rules_of(shape):
        here = [key for key in (rule.key, OTHER_KEYS.get(rule.key)) if key in stored]
        if not here:
            missing.append(rule.key)
            continue
        found[rule.key] = here[0]
        size = rule.megatron_size(shape)
        wanted = torch.Size([shape.num_layers, *size]) if rule.is_per_layer else size
        if stored[here[0]] != wanted:
            raise ConfigurationError(
                f"{here[0]} has size {list(stored[here[0]])}, but {list(wanted)} by the arguments"
            )
    foreign = sorted(set(stored) - set(found.values()))
    if missing or foreign:
        raise ConfigurationError(describe_difference("the checkpoint", shape, missing, foreign))
    return found
