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
    jobs = _in_order(shape)

    def target_dtype(rule: TensorRule) -> torch.dtype:
        return dtype or reader.tensors[keys[rule.key]].properties.dtype

    infos = {
        name: TensorInfo(size, target_dtype(rule))
        for rule, place in jobs
        for name, size in zip(rule.names_of(place), rule.hf_sizes(shape), strict=True)
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for rule, place in progress(jobs, len(jobs)):
            whole = reader.read(keys[rule.key], place)
            pieces = rule.to_hf(whole.to(target_dtype(rule)), shape)
            yield from zip(rule.names_of(place), pieces, strict=True)

    with complete_or_absent(output) as folder:
        write_config(shape, folder, target_dtype(rules_of(shape)[0]))
        write_folder(folder, infos, tensors(), max_file_nbytes)
    return shape


def _in_order(shape: ModelShape) -> list[tuple[TensorRule, tuple[int, ...]]]:
    """Every rule with every place, so that a layer's tensors come together."""
    jobs = [(rule, place) for rule in rules_of(shape) for place in rule.places(shape)]
    return sorted(jobs, key=lambda job: job[1][:1])


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
        wanted = torch.Size([*rule.stack(shape), *size])
        if stored[here[0]] != wanted:
            raise ConfigurationError(
                f"{here[0]} has size {list(stored[here[0]])}, but {list(wanted)} by the arguments"
            )
    twins = {rule.twin for rule in rules_of(shape)}
    foreign = sorted(set(stored) - set(found.values()) - twins)
    if missing or foreign:
        raise ConfigurationError(describe_difference("the checkpoint", shape, missing, foreign))
    return found
