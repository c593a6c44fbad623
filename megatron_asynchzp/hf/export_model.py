# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a Megatron checkpoint to a Hugging Face directory."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.hf.adapters import MergingReader, alpha_of
from megatron_asynchzp.hf.contents import jobs_in_order_of_use, match_keys, write_model
from megatron_asynchzp.hf.mapping import TensorRule
from megatron_asynchzp.hf.megatron_arguments import read_arguments
from megatron_asynchzp.hf.output_folder import check_unoccupied
from megatron_asynchzp.hf.progress import Progress, no_progress
from megatron_asynchzp.hf.safetensors_folder import MAX_FILE_NBYTES
from megatron_asynchzp.hf.shape import ModelShape
from megatron_asynchzp.hf.torch_dist import find_checkpoint, read_arguments_of

# Keys of a checkpoint that do not belong to the model.
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
    base: Path | None = None,
    adapter_alpha: float | None = None,
) -> ModelShape:
    """Write the model of a Megatron checkpoint as a Hugging Face directory.

    Memory holds one tensor, in a few copies.

    Args:
        load: Megatron's --load folder.
        output: A new or empty directory.
        step: The iteration; by default the newest that is intact.
        dtype: Of the written tensors; by default every tensor keeps its own.
        vocab_size: Rows of the embedding that are not padding, if the checkpoint does not say.
        level: How much of the data is read to find damage.
        max_file_nbytes: See write_folder.
        progress: Shows the tensors that are done.
        base: Megatron's --load folder with the frozen tensors, if `load` has adapters alone.
        adapter_alpha: Adapters are merged in fp32, times alpha / rank.

    Raises:
        ConfigurationError: The model has no family here, or `output` is not empty. Nothing is
            written then.
    """
    check_unoccupied(output)
    checkpoint = find_checkpoint(load, step, level)
    args = read_arguments_of(checkpoint)
    shape = read_arguments(args, vocab_size)
    rest = None if base is None else find_checkpoint(base, level=level)
    reader = MergingReader(checkpoint, rest, alpha_of(args, adapter_alpha))
    keys = _match_keys(reader, shape)

    def target_dtype(rule: TensorRule) -> torch.dtype:
        return dtype or reader.tensors[keys[rule.key]].properties.dtype

    def tensors() -> Iterator[tuple[str, Tensor]]:
        jobs = jobs_in_order_of_use(shape)
        for job in progress(jobs, len(jobs)):
            whole = reader.read(keys[job.rule.key], job.place)
            yield from job.convert(whole.to(target_dtype(job.rule)), shape)

    write_model(output, shape, target_dtype, tensors(), max_file_nbytes)
    return shape


def _match_keys(reader: MergingReader, shape: ModelShape) -> dict[str, str]:
    sizes = {
        key: it.size
        for key, it in reader.tensors.items()
        if not key.startswith(_NOT_THE_MODEL) and "_extra_state" not in key
    }
    return match_keys("the checkpoint", sizes, shape)
