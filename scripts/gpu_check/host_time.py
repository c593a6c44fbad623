# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the engine's host time per unit and micro-batch, and how long the GPU is idle."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megatron_asynchzp.engine.comm.timeline import Span, union_s
from megatron_asynchzp.engine.schedule import ON_STREAMS, ScheduleConfig
from scripts.gpu_check.loopback import WORLD_SIZE
from scripts.gpu_check.loopback_world import LoopbackWorld
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.toy import ToyShape, batch_of, loss_of, new_model
from scripts.gpu_check.trainers import LoopbackTrainer

# What all threads together may spend on a unit of 12 parameters, forward and backward, in a
# micro-batch: autograd runs backward in a thread of its own. Against a stub device it was 240
# (docs/results/device.md); here the calls of the driver and of NCCL are added.
LIMIT_US = 1500.0
_SIZES = (8, 8, 8)
_MICRO_BATCHES, _WARM_UP, _ROUNDS = 4, 2, 5


def small_shape() -> ToyShape:
    """Kernels shorter than their launch: the host is what takes time."""
    return ToyShape(width=16, depth=8)


def large_shape() -> ToyShape:
    """Kernels of about a millisecond: the host should be ahead of the GPU."""
    return ToyShape(width=2048, depth=8, vocab=8192, sequence=512, batch=8)


def host_seconds(step: Callable[[], Any], rounds: int) -> float:
    """Seconds that all threads of this process compute in the fastest of `rounds` steps."""
    for _ in range(_WARM_UP):
        step()
    found = []
    for _ in range(rounds):
        start_s = time.process_time()
        step()
        found.append(time.process_time() - start_s)
    return min(found)


def new_trainer(
    shape: ToyShape, schedule: str, device: torch.device
) -> tuple[LoopbackTrainer, list[torch.Tensor]]:
    """An engine whose collectives are copies without delay, and the batches of a step."""
    world = LoopbackWorld(device, WORLD_SIZE, 0, longest_delay_s=0.0)
    trainer = LoopbackTrainer(shape, world, _SIZES, ScheduleConfig(schedule, 1))
    return trainer, [batch_of(shape, 0, index, device) for index in range(_MICRO_BATCHES)]


def plain_pass(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """The micro-batches of a step in a process that updates nothing."""
    for tokens in batches:
        loss_of(model, tokens).backward()
        for param in model.parameters():
            param.grad = None


def added_us(schedule: str, device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the host microseconds per block and micro-batch that the engine adds."""
    shape = small_shape()
    trainer, batches = new_trainer(shape, schedule, device)
    model = new_model(shape, device)
    ours = host_seconds(lambda: trainer.step(batches), rounds)
    theirs = host_seconds(lambda: plain_pass(model, batches), rounds)
    trainer.close()
    return (ours - theirs) / len(batches) / shape.depth * 1e6


def traced(step: Callable[[], Any], path: Path, is_cuda: bool) -> dict[str, float]:
    """Write a trace of a step to `path`, and return its time and the part that the GPU was idle.

    The result is empty if torch's profiler sees no kernel, as on an NPU.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if is_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    if not is_cuda:
        return {}
    spans = [
        Span("", "", event.time_range.start, event.time_range.end)
        for event in profiler.events()  # pyright: ignore[reportOptionalIterable]
        if event.device_type == torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    ]
    if not spans:
        return {}
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return {"step ms": whole / 1e3, "idle part": 1.0 - union_s(spans) / whole}


def plain_times(shape: ToyShape, device: torch.device, target: Target) -> dict[str, float]:
    """As `traced`, of forward and backward without the engine."""
    model = new_model(shape, device)
    batches = [batch_of(shape, 0, index, device) for index in range(_MICRO_BATCHES)]
    for _ in range(_WARM_UP):
        plain_pass(model, batches)
    path = target.folder / "trace_plain.json"
    return traced(lambda: plain_pass(model, batches), path, target.is_cuda)


def run(target: Target, rounds: int = _ROUNDS) -> dict[str, Any]:
    device = torch.device(target.device)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    shape = large_shape() if target.is_large else replace(small_shape(), depth=3)
    figures["plain process"] = plain_times(shape, device, target)
    for schedule in ON_STREAMS:
        added = added_us(schedule, device, rounds)
        trainer, batches = new_trainer(shape, schedule, device)
        for _ in range(_WARM_UP):
            trainer.step(batches)
        path = target.folder / f"trace_{schedule}.json"
        times = traced(lambda: trainer.step(batches), path, target.is_cuda)  # noqa: B023
        trainer.close()
        figures[schedule] = {"host us per unit and micro-batch": added, **times}
        if target.is_large and added > LIMIT_US:
            text = f"{added:.0f} host us per unit and micro-batch, more than {LIMIT_US:g}"
            raise CheckFailed(f"{schedule}: {text}", figures)
    return figures
