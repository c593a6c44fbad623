# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one contender's turn within a run of Megatron: its saves, its loads, and that what was
loaded is what was saved.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scripts.testbed.cpu_usage import CpuUsage
from scripts.testbed.memory import MemoryCount, ResidentMemory

# What of AsyncHZP's own is timed within a save and a load, where it is looked up.
TIMED_PARTS = {
    "megatron_asynchzp.mcore.checkpoint.save_guard": (
        "prepare_directory",
        "complete_directory",
        "complete_index",
    ),
    "megatron_asynchzp.mcore.checkpoint.load_guard": ("choose_checkpoint", "ask_for_what_is_there"),
}


@dataclass
class Act:
    """One save or load, of the slowest rank in time and of the largest in memory.

    resident_nbytes, tensor_nbytes: of a rank beyond what it had at rest, as the kernel sees it and
    in tensors (None where they cannot be counted); total_nbytes: tensors at the highest, those at
    rest included; parts_s: seconds on rank 0. What is resident in all is left out: it holds what
    the heap keeps of the contenders before.
    """

    seconds: float
    resident_nbytes: int
    tensor_nbytes: int | None
    total_nbytes: int | None
    foreign_cpu: float
    parts_s: dict[str, float]


@dataclass
class TurnResult:
    """acts: by name, in their order; disk_nbytes, num_files: of one checkpoint."""

    acts: dict[str, Act] = field(default_factory=dict)
    disk_nbytes: int = 0
    num_files: int = 0


class Turn:
    """Saves into `folder` and loads from it, from inside a run that has just taken a step. To be
    made before that run: what is alive then is not counted as the contender's."""

    def __init__(self, folder: Path, num_saves: int, count: MemoryCount | None):
        self._folder, self._num_saves, self._count = folder, num_saves, count
        self._before_nbytes = count.live_nbytes if count is not None else 0

    def measure(self, chunks: Sequence, optimizer: Any) -> TurnResult:
        """For `run_pretrain(inspect=...)`. Collective. Raises AssertionError where a load does not
        bring back what was saved."""
        from megatron.training import checkpointing, get_args

        args, context, result = get_args(), {}, TurnResult()
        saved = fingerprint(live_tensors(chunks, optimizer))
        args.save = args.load = str(self._folder)
        if dist.get_rank() == 0:
            self._folder.mkdir()
        for number in range(1, self._num_saves + 1):
            name = "first save" if number == 1 else f"save {number}"
            result.acts[name] = self._act(
                partial(
                    checkpointing.save_checkpoint,
                    number,
                    chunks,
                    optimizer,
                    None,
                    0,
                    checkpointing_context=context,
                )
            )
        newest = self._folder / f"iter_{self._num_saves:07d}"
        sizes = [path.stat().st_size for path in newest.iterdir()]
        result.disk_nbytes, result.num_files = sum(sizes), len(sizes)
        for name in ("cold load", "load 2", "load 3"):
            for tensor in live_tensors(chunks, optimizer):
                tensor.zero_()
            if name == "cold load":
                _forget_pages(newest)
            with mock.patch.multiple(args, consumed_train_samples=0, consumed_valid_samples=0):
                result.acts[name] = self._act(
                    lambda: checkpointing.load_checkpoint(
                        chunks, optimizer, None, checkpointing_context={}
                    )
                )
            assert fingerprint(live_tensors(chunks, optimizer)) == saved, f"{name} differs"
        args.save = args.load = None
        return result

    def _act(self, act: Callable[[], Any]) -> Act:
        memory = ResidentMemory()
        if self._count is not None:
            self._count.reset_peak()
            rest_nbytes = self._count.live_nbytes
        with _timed_parts() as parts_s:
            dist.barrier()
            usage, begin_s = CpuUsage(), time.perf_counter()
            act()
            dist.barrier()
            seconds = time.perf_counter() - begin_s
        foreign_cpu, peak = usage.foreign_share(), memory.peak()
        mine = [seconds, peak.beyond_nbytes]
        if self._count is not None:
            peak_nbytes = self._count.peak_nbytes
            mine += [peak_nbytes - rest_nbytes, peak_nbytes - self._before_nbytes]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        most = [max(values) for values in zip(*gathered, strict=True)]
        return Act(*(most + [None, None])[:4], foreign_cpu, parts_s)


@contextmanager
def _timed_parts() -> Iterator[dict[str, float]]:
    """Seconds by function of TIMED_PARTS, those that were called."""
    from importlib import import_module

    parts_s: dict[str, float] = {}

    def timed(name: str, original: Callable) -> Callable:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                parts_s[name] = parts_s.get(name, 0.0) + time.perf_counter() - begin_s

        return call

    with ExitStack() as stack:
        for module_name, names in TIMED_PARTS.items():
            module = import_module(module_name)
            for name in names:
                wrapped = timed(name, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield parts_s


def live_tensors(chunks: Sequence, optimizer: Any) -> list[torch.Tensor]:
    """What training goes on from: parameters or shards of them, main parameters and moments."""
    tensors: list[torch.Tensor] = []
    for chunk in chunks:
        if hasattr(chunk, "runtime"):
            chunk.runtime.settle()
            tensors += [unit.model_param.storage for unit in chunk.units]
        else:
            tensors += [param.data for param in chunk.parameters()]
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for fragment, state in one.optimizer.state.items():
            values = [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
            tensors += [fragment.data] + [value for value in values if value.dim()]
    return tensors


def fingerprint(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number per tensor that depends on every bit and on their order."""
    numbers = []
    for tensor in tensors:
        kind = torch.int16 if tensor.itemsize == 2 else torch.int32
        bits = tensor.detach().reshape(-1).view(kind)
        for part in bits.split(1 << 20):  # no copy of the whole
            weights = torch.arange(1, part.numel() + 1)
            numbers.append(int((part.long() * weights).sum()))
    return numbers


def _forget_pages(folder: Path) -> None:
    """Drop the files from the page cache, as after a restart on another machine. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
    dist.barrier()
