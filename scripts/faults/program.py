# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the engine around a small transformer in a plain loop, for the table of faults.

It ends as a run of Megatron ends. Each rank is forked from a process that has imported this.

Notes in $FAULT_FOLDER/RANK: `began STEP`, `step STEP LOSS` (all its bits), `done`.
"""

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem

from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.library import runtime as sharded_runtime
from megatron_asynchzp.library.sharded_model import ShardedModel, shard
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.ending import end_training
from scripts.faults.cells import LAST_STEP, SAVE_EVERY
from scripts.faults.moments import Moment

# What a rank would import in the middle of its first step and its first checkpoint.
for _late in ("torch._dynamo", "torch._inductor.test_operators", "fsspec.core", "numpy.random"):
    importlib.import_module(_late)
gc.collect()
gc.freeze()  # a rank that collects garbage need not copy the pages of these objects

_MICRO_BATCHES = 2
_WIDTH, _DEPTH, _VOCAB, _LENGTH = 48, 3, 61, 16


@dataclass(frozen=True)
class Task:
    """The settings of one run."""

    sizes: tuple[int, int, int]
    schedule: str
    limit_s: float
    checkpoints: Path
    notes: Path


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(_VOCAB, _WIDTH)
        self.blocks = nn.ModuleList(_Block(_WIDTH) for _ in range(_DEPTH))
        self.output = nn.Linear(_WIDTH, _VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def complete_checkpoints(folder: Path) -> list[int]:
    """Return the steps with a whole checkpoint in `folder`: torch writes its metadata last."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


def main(task: Task) -> None:
    """The life of a rank; with torchrun's variables."""
    torch.set_num_threads(1)
    try:
        _train(task)
    except BaseException as error:
        end_training(error)
        raise


def _train(task: Task) -> None:
    moment = Moment()
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.limit_s))
    config = ScheduleConfig(task.schedule, time_limit_s=task.limit_s)
    communication = Communication(config, CpuDevice())
    sharded = _sharded(task, communication)
    note = _noting(task)
    _prepare(moment, sharded)
    first = 1
    if steps := complete_checkpoints(task.checkpoints):
        first = steps[-1] + 1
        moment.is_armed = True
        _load(sharded, task.checkpoints / str(steps[-1]))
    note("began", first)
    for step in range(first, LAST_STEP + 1):
        note("step", step, _one_step(sharded, step).hex())
        if step % SAVE_EVERY == 0:
            dcp.save(sharded.state_dict(), checkpoint_id=task.checkpoints / str(step))  # pyright: ignore[reportPrivateImportUsage]
            moment.is_armed = True
    dist.barrier()
    communication.close()
    note("done")


def _sharded(task: Task, communication: Communication) -> ShardedModel:
    torch.manual_seed(1)
    model = _Model()
    runtime_of = partial(HZPRuntime, driver=communication.driver)
    with mock.patch.object(sharded_runtime, "HZPRuntime", runtime_of):
        made = shard(
            model,
            model.blocks,
            ShardSizes(*task.sizes),
            lambda params: torch.optim.AdamW(params, lr=1e-3),
            schedule=communication.schedule,
        )
    communication.runtimes.append(made.runtime)
    return made


def _noting(task: Task) -> Callable[..., None]:
    file = task.notes / str(dist.get_rank())

    def note(*words: Any) -> None:
        with file.open("a") as out:
            print(*words, file=out)

    return note


def _prepare(moment: Moment, sharded: ShardedModel) -> None:
    moment.amid_collectives()
    moment.before(sharded.optimizer, "step", "optimizer")
    moment.before(filesystem, "_write_item", "save")
    moment.before(filesystem.FileSystemReader, "read_data", "load")


def _load(sharded: ShardedModel, folder: Path) -> None:
    state = sharded.state_dict()
    dcp.load(state, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    sharded.load_state_dict(state)


def _one_step(sharded: ShardedModel, step: int) -> float:
    """The mean loss of all ranks."""
    sharded.zero_grad()
    total = torch.zeros(())
    for index in range(_MICRO_BATCHES):
        sharded.set_is_last_micro_batch(index == _MICRO_BATCHES - 1)
        tokens = _batch(step, index)
        logits = sharded.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / _MICRO_BATCHES).backward()
        total += loss.detach() / _MICRO_BATCHES
    sharded.clip_grad_norm_(1.0)
    sharded.optimizer.step()
    dist.all_reduce(total)  # as a training script does
    return total.item()


def _batch(step: int, index: int) -> torch.Tensor:
    seed = 10_000 * step + 100 * index + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _VOCAB, (2, _LENGTH + 1), generator=generator)
