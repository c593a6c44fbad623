# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a running Megatron model to a Hugging Face directory, without a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.mapping import write_model
from megatron_asynchzp.hf.output_folder import check_unoccupied
from megatron_asynchzp.hf.safetensors_folder import MAX_FILE_NBYTES
from megatron_asynchzp.hf.weight_stream import WeightStream

_WRITER = 0


def save_hf(
    model: Sequence[Any],
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    max_file_nbytes: int = MAX_FILE_NBYTES,
) -> None:
    """Write a model that trains with --use-asynchzp as a Hugging Face directory.

    The files are those that `asynchzp hf export` makes of a checkpoint of this step. Call it
    between two steps. Collective over the world; rank 0 writes.

    Args:
        model: See stream_weights, also for the memory that it takes.
        output: A new or empty directory, which is written completely or not at all.
        dtype: See stream_weights.
        vocab_size: See stream_weights.
        max_file_nbytes: Size of a weight file.

    Raises:
        ConfigurationError: On all ranks, if stream_weights raises it or rank 0 cannot write.
    """
    folder, is_writer = Path(output), dist.get_rank() == _WRITER

    def check() -> None:
        if is_writer:
            check_unoccupied(folder)

    stream = WeightStream("save_hf()", model, (_WRITER,), dtype, vocab_size, check=check)
    weights, problem = stream.weights(), None
    if is_writer:
        try:
            on_host = ((name, tensor.cpu()) for name, tensor in weights)
            write_model(folder, stream.shape, stream.dtype_of, on_host, max_file_nbytes)
        except (ConfigurationError, OSError, ImportError) as error:
            problem = f"save_hf(): {error}"
    for _ in weights:  # ranks that only send; or the rest of a failed write, for which they wait
        pass
    problems = [problem]
    dist.broadcast_object_list(problems, _WRITER)
    if problems[0] is not None:
        raise ConfigurationError(problems[0])
