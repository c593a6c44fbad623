# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Two small checkpoints that Megatron itself writes, and what torch reads back from a directory.
Uses none of the code that judges directories.
"""

import contextlib
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist


def save_two(folder: str) -> None:
    """On two ranks: iterations 2 and 4 of a model without a meaning, as save_checkpoint does. What
    Megatron syncs stands in synced.txt beside the folder."""
    from megatron.core import dist_checkpointing

    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.mcore.checkpoint.save_guard import return_results_in_process

    cpu_platform.install()
    return_results_in_process()
    for iteration in (2, 4):
        target = Path(folder, f"iter_{iteration:07d}")
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        with _noting_syncs(Path(folder).with_name("synced.txt")):
            dist_checkpointing.save(_state(iteration), str(target))
        dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest_checkpointed_iteration.txt").write_text("4")


@contextlib.contextmanager
def _noting_syncs(notes: Path) -> Iterator[None]:
    """Append to a file, from any process, the folder and the name of what is synced."""
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        name = path.name.removesuffix(".tmp")  # renamed when it is whole
        with open(notes, "a") as file:
            file.write(f"{path.parent.name}/{name}\n")
        fsync(descriptor)

    with mock.patch.object(os, "fsync", noted):
        yield


def _state(iteration: int) -> dict:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank = dist.get_rank()
    numbers = torch.Generator().manual_seed(100 * iteration + rank)
    tensors = {
        "weight": torch.randn(8, 16, generator=numbers),
        "bias": torch.randn(16, generator=numbers).bfloat16(),
        "other.weight": torch.randn(8, 16, generator=numbers),
        "steps": torch.randint(0, 9, (4,), generator=numbers),
    }
    state = {
        name: ShardedTensor.from_rank_offsets(name, tensor, (0, rank, 2))
        for name, tensor in tensors.items()
    }
    state["rng"] = ShardedObject("rng", {"rank": rank, "iteration": iteration}, (2,), (rank,))
    return state | {"iteration": iteration, "notes": "common to all ranks"}


def read_state(iteration_dir: Path) -> dict[str, bytes]:
    """Every tensor and object in a checkpoint as torch loads it, as bytes, without our help."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(iteration_dir)
    state: dict = {}
    for name, output in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(output, TensorStorageMetadata)
        state[name] = BytesIO()
        if is_tensor:
            state[name] = torch.empty(output.size, dtype=output.properties.dtype)
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return {name: _bytes(value) for name, value in state.items()}


def _bytes(value: object) -> bytes:
    is_tensor = isinstance(value, torch.Tensor)
    return value.view(torch.uint8).numpy().tobytes() if is_tensor else repr(value).encode()
