# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: 200 steps and 100 evaluations leave behind what the first ones did, and no more."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_asynchzp.engine.schedule import ON_STREAMS, ScheduleConfig
from scripts.gpu_check.loopback import SIZES, WORLD_SIZE
from scripts.gpu_check.loopback_world import LoopbackWorld
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.toy import ToyShape, batch_of
from scripts.gpu_check.trainers import LoopbackTrainer

STEPS, EVALUATIONS = 200, 100
_WARM_UP = 0.1  # the part of them after which nothing may grow
# What may grow: memory that the allocator keeps, and Python objects, by a part of what there is.
_SLACK = {"reserved bytes": 0.05, "python blocks": 0.002}

# The thread that holds the time limit lets go of what has ended, a few times per limit.
_TIME_LIMIT_S, _FORGET_S = 5.0, 1.2


def live(device: torch.device) -> dict[str, int]:
    """Return the live memory and objects, once all issued work is done."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        module.synchronize(device)
    gc.collect()
    objects = gc.get_objects()
    found = {
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in objects),
        "python blocks": sys.getallocatedblocks(),
    }
    if module is not None:
        found["events"] = sum(isinstance(one, module.Event) for one in objects)
        found["allocated bytes"] = module.memory_allocated(device)
        found["reserved bytes"] = module.memory_reserved(device)
    return found


def growth(trainer: LoopbackTrainer, act: Callable[[], Any], times: int) -> dict[str, int]:
    """Return the growth of live memory while `act()` runs, after the first tenth of the times."""

    def count() -> dict[str, int]:
        trainer.runtime.settle()
        if trainer.world.device.type != "cpu":
            torch.get_device_module(trainer.world.device).synchronize()
            time.sleep(_FORGET_S)
        return live(trainer.world.device)

    first = max(2, round(_WARM_UP * times))  # of at least three
    before: dict[str, int] = {}
    for index in range(times):
        if index == first:
            count()  # what counting itself needs
            before = count()
        act()
    return {what: number - before[what] for what, number in count().items()}


def measure(
    schedule: str, device: torch.device, steps: int, evaluations: int
) -> dict[str, dict[str, int]]:
    """Growth in `steps` steps, and in `evaluations` evaluations after them."""
    shape = ToyShape(depth=2)
    world = LoopbackWorld(device, WORLD_SIZE, 3, longest_delay_s=0.0)
    config = ScheduleConfig(schedule, 1, time_limit_s=_TIME_LIMIT_S)
    trainer = LoopbackTrainer(shape, world, SIZES[0], config)
    batches = [batch_of(shape, 0, 0, device)]
    grown = {
        "steps": growth(trainer, lambda: trainer.step(batches), steps),
        "evaluations": growth(trainer, lambda: trainer.evaluate(batches[0]), evaluations),
    }
    trainer.close()
    return grown


def excess(grown: dict[str, int], totals: dict[str, int]) -> list[str]:
    """What grew by more than it may."""
    return [
        f"{what} by {count}"
        for what, count in grown.items()
        if count > _SLACK.get(what, 0.0) * totals[what]
    ]


def run(
    target: Target,
    steps: int = STEPS,
    evaluations: int = EVALUATIONS,
    schedules: Sequence[str] = ON_STREAMS,
) -> dict[str, Any]:
    device = torch.device(target.device)
    figures, faults = {}, []
    for schedule in schedules:
        grown = measure(schedule, device, steps, evaluations)
        figures[schedule] = grown
        totals = live(device)
        for phase, counts in grown.items():
            faults += [f"{schedule}, {phase}: {one}" for one in excess(counts, totals)]
    if faults:
        raise CheckFailed(f"grown: {'; '.join(faults)}", figures)
    return figures
