# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: every schedule trains bit for bit as a plain process, however late collectives are."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from megatron_asynchzp.engine.schedule import ON_STREAMS, ScheduleConfig
from scripts.gpu_check.loopback_world import LoopbackWorld
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.poison import poisoned_places
from scripts.gpu_check.toy import ToyShape, batch_of
from scripts.gpu_check.trainers import LoopbackTrainer, PlainTrainer

WORLD_SIZE, STEPS, MICRO_BATCHES = 8, 3, 2
SIZES = ((2, 4, 8), (8, 1, 8), (8, 8, 8))
DEPTHS = (0, 1, 3)
LONGEST_DELAY_S = {"cuda": 0.002, "npu": 0.002, "cpu": 0.0005}
_TIME_LIMIT_S = 60.0

Pair = tuple[str, torch.Tensor, torch.Tensor]
"""What it is, what the engine found, what the plain process found."""


class Case(NamedTuple):
    """One training. variant: the name of a ToyShape."""

    variant: str
    sizes: tuple[int, int, int]
    schedule: str
    depth: int

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.sizes))
        return f"{self.variant}, sizes {sizes}, {self.schedule}, depth {self.depth}"


def variants(is_large: bool) -> dict[str, ToyShape]:
    plain = ToyShape()
    if is_large:
        # Kernels that take longer than their launch, and gradients on both sides of the size from
        # which the engine moves each of them by itself.
        plain = ToyShape(width=512, depth=4, vocab=512, sequence=64, batch=4)
    return {
        "plain": plain,
        "plain fp32": replace(plain, dtype=torch.float32),
        "tied": replace(plain, is_tied=True),
        "recompute": replace(plain, recomputes=True),
    }


def cases(names: Sequence[str]) -> Iterator[Case]:
    """All there are; inline gathers nothing ahead, so it has one depth."""
    for variant, sizes, schedule in product(names, SIZES, ON_STREAMS):
        for depth in DEPTHS if schedule != "inline" else DEPTHS[:1]:
            yield Case(variant, sizes, schedule, depth)


def train_both(case: Case, shape: ToyShape, device: torch.device, rank: int) -> list[Pair]:
    """Train by the plain process and, as `rank` of the world, by the engine; what to compare."""
    world = LoopbackWorld(device, WORLD_SIZE, rank, LONGEST_DELAY_S[device.type], seed=rank)
    plain = PlainTrainer(shape, device)
    config = ScheduleConfig(case.schedule, case.depth, time_limit_s=_TIME_LIMIT_S)
    trainer = LoopbackTrainer(shape, world, case.sizes, config)
    # Before the first step: from here on the host waits for nothing.
    data = [
        [batch_of(shape, step, index, device) for index in range(MICRO_BATCHES)]
        for step in range(STEPS)
    ]
    pairs: list[Pair] = []
    with poisoned_places():
        for step, batches in enumerate(data):
            true_losses = plain.step(batches)
            losses = trainer.compute(batches)
            grads = trainer.own_grads(plain.grads)
            trainer.apply(plain.main)
            pairs += [("loss", a, b) for a, b in zip(losses, true_losses, strict=True)]
            pairs += [(f"gradients of {name}", a, b) for name, a, b in grads]
            if step == 1:
                evaluated = trainer.evaluate(batches[0]), plain.evaluate(batches[0])
                pairs.append(("loss of the evaluation", *evaluated))
        trainer.runtime.settle()
        params = trainer.own_params(plain.main)
        pairs += [(f"parameters of {name}", a, b) for name, a, b in params]
        trainer.close()
    return pairs


def first_difference(pairs: Sequence[Pair]) -> str | None:
    """Return the first difference, or None if all bits are equal; the host waits for all."""
    for what, found, true in pairs:
        if not torch.equal(found, true):
            error = (found - true).abs().max().item()
            return f"the {what} are not those of a plain process, by {error:.3g} at most"
    return None


def run_cases(chosen: Sequence[tuple[Case, ToyShape]], device: torch.device) -> dict[str, Any]:
    """Run them all, each as another rank. Raises CheckFailed with the first that differs."""
    start_s, different = time.monotonic(), []
    for index, (case, shape) in enumerate(chosen):
        rank = index % WORLD_SIZE
        difference = first_difference(train_both(case, shape, device, rank))
        if difference is not None:
            print(f"{case}, rank {rank}: {difference}", flush=True)
            different.append(f"{case}, rank {rank}: {difference}")
    figures = {"cases": len(chosen), "seconds": time.monotonic() - start_s}
    if different:
        raise CheckFailed(f"{len(different)} of {len(chosen)} differ; {different[0]}", figures)
    return figures


def choose_deterministic_kernels() -> None:
    """Two runs of the same kernels are to give the same bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def run(target: Target) -> dict[str, Any]:
    choose_deterministic_kernels()
    shapes = variants(target.is_large)
    chosen = [(case, shapes[case.variant]) for case in cases(list(shapes))]
    return run_cases(chosen, torch.device(target.device))
