# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the way from a running Megatron model to a Hugging Face directory, without a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.contents import write_model
from megatron_asynchzp.hf.output_folder import refuse_occupied
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
    """Write a model that trains with --use-asynchzp as a Hugging Face directory: the same files
    that `asynchzp hf export` makes of a checkpoint of this step. Between two steps. Collective
    over the world; rank 0 writes.

    output: not there yet, or empty; what is written is complete or not there.
    max_file_nbytes: of a weight file. Other arguments, and memory, as for stream_weights.

    Raises ConfigurationError on all ranks: where stream_weights does, and where `output` cannot be
    written.
    """
    folder, is_writer = Path(output), dist.get_rank() == _WRITER

    def refuse() -> None:
        if is_writer:
            refuse_occupied(folder)

    stream = WeightStream("save_hf()", model, (_WRITER,), dtype, vocab_size, refuse=refuse)
    weights, problem = stream.weights(), None
    if is_writer:
        try:
            on_host = ((name, tensor.cpu()) for name, tensor in weights)
            write_model(folder, stream.shape, stream.dtype_of, on_host, max_file_nbytes)
        except (ConfigurationError, OSError, ImportError) as error:
            problem = f"save_hf(): {error}"
    for _ in weights:  # those that only send; or the rest, so that they are not left waiting
        pass
    told = [problem]
    dist.broadcast_object_list(told, _WRITER)
    if told[0] is not None:
        raise ConfigurationError(told[0])
