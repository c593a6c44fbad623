# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of the tiny GPT that save and resume, and what two checkpoints have in common. Knows no
configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_cp

from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from tests.support.parity import Sizes, size_flags

SAVED_AT, NUM_STEPS = 2, 4
# fmt: off
RESHARDABLE = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
               "--dist-ckpt-optim-fully-reshardable"]
# fmt: on


@dataclass(frozen=True)
class Job:
    """One way to train the tiny GPT: flags of the model, and shard sizes, or None for stock."""

    sizes: Sizes | None
    flags: tuple[str, ...] = ()

    def argv(self, *more: str) -> list[str]:
        ours = [] if self.sizes is None else size_flags(self.sizes)
        return gpt_args("--train-iters", str(NUM_STEPS), *self.flags, *ours, *more)

    def train_and_save(self, directory: Path) -> RunRecord:
        """All steps, a checkpoint in the middle."""
        return run_pretrain(
            self.argv("--save", str(directory), "--save-interval", str(SAVED_AT)), inspect=state_of
        )

    def resume(self, directory: Path) -> RunRecord:
        """The steps after the checkpoint in the middle."""
        flags = ["--ckpt-step", str(SAVED_AT), "--override-opt_param-scheduler"]
        if "--async-save" in self.flags:  # refused where nothing is saved
            flags += ["--save", f"{directory}_resumed", "--save-interval", str(NUM_STEPS)]
        return run_pretrain(self.argv("--load", str(directory), *flags), inspect=state_of)

    def load_and_save(self, source: Path, target: Path) -> None:
        """Write what was read, without a step between."""
        run_pretrain(
            self.argv(
                *("--load", str(source), "--ckpt-step", str(SAVED_AT), "--save", str(target)),
                *("--train-iters", str(SAVED_AT), "--override-opt_param-scheduler"),
                *("--save-interval", "1000"),
            )
        )


def state_of(chunks: Sequence, optimizer) -> list[torch.Tensor]:
    """Copies of this rank's parameters or shards and of its moments."""
    for chunk in chunks:
        if hasattr(chunk, "runtime"):
            chunk.runtime.settle()
    tensors = [
        unit.model_param.storage
        for chunk in chunks
        for unit in (chunk.units if hasattr(chunk, "units") else ())
    ]
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for fragment, state in one.optimizer.state.items():
            tensors.append(fragment.data)
            tensors += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
    return [tensor.clone() for tensor in tensors]


def read_tensors(directory: Path, iteration: int = SAVED_AT) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole; each rank reads them for itself."""
    reader = dist_cp.FileSystemReader(directory / f"iter_{iteration:07d}")
    tensors: dict[str, Any] = {
        key: torch.empty(kind.size, dtype=kind.properties.dtype)
        for key, kind in reader.read_metadata().state_dict_metadata.items()
        if isinstance(kind, dist_cp.TensorStorageMetadata)
    }
    dist_cp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def find_differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of `left` that `right` lacks or holds with another bit or dtype."""
    return [
        key
        for key, value in left.items()
        if key not in right
        or value.dtype != right[key].dtype
        or not torch.equal(_bytes(value), _bytes(right[key]))
    ]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)
