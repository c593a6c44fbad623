# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains with collectives that stop ending: `... SCHEDULE DEVICE LIMIT_S`."""

import sys

import torch

from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.ending import report_own_errors
from scripts.gpu_check.loopback import WORLD_SIZE
from scripts.gpu_check.loopback_world import LoopbackWorld
from scripts.gpu_check.toy import ToyShape, batch_of
from scripts.gpu_check.trainers import LoopbackTrainer

_LAST_GOOD_STEP, _STEPS = 1, 10


def main(argv: list[str]) -> int:
    schedule, device, limit_s = argv[0], torch.device(argv[1]), float(argv[2])
    report_own_errors()
    config = ScheduleConfig(schedule, time_limit_s=limit_s)
    world = LoopbackWorld(device, WORLD_SIZE, 0, longest_delay_s=0.0)
    communication = Communication(config, device_of(torch.empty(0, device=device)))
    shape = ToyShape()
    trainer = LoopbackTrainer(shape, world, (2, 4, 8), config, communication.driver)
    communication.runtimes.append(trainer.runtime)
    for step in range(_STEPS):
        world.endless = step > _LAST_GOOD_STEP
        losses = trainer.step([batch_of(shape, step, 0, device)])
        print(f"step {step}: loss {losses[0].item():.4f}", flush=True)
    print("no collective was missed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
