# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Threads that sleep at random, whatever memory and depth: the same bits, and no place is lost."""

import random
import time
from dataclasses import dataclass

import pytest
import torch

from megatron_asynchzp.comm.thread_driver import ThreadDriver
from megatron_asynchzp.comm.timeline import Timeline
from megatron_asynchzp.device import CpuDevice
from megatron_asynchzp.testbed.ranks import run_ranks
from megatron_asynchzp.zero.config import ScheduleConfig
from tests.support.engine import EngineTrainer, build_toy

STEPS, MOST_SLEEP_S = 3, 0.002
SIZES = [(2, 2, 4), (4, 1, 4), (1, 4, 4), (4, 2, 4), (2, 4, 4), (4, 4, 4)]
MODELS = [{}, {"is_tied": True}, {"recompute": True}]


@dataclass(frozen=True)
class Program:
    """What one run does; everything but the sleeps follows from it."""

    sizes: tuple[int, int, int]
    model: int
    dtype: torch.dtype
    micro_batches: tuple[int, ...]
    memory: float


def draw_program(dice: random.Random) -> Program:
    return Program(
        dice.choice(SIZES),
        dice.randrange(len(MODELS)),
        dice.choice([torch.float32, torch.bfloat16]),
        tuple(dice.randint(1, 3) for _ in range(STEPS)),
        dice.choice((0.0, 0.2, 0.6, 1.0)),
    )


def draw_schedule(dice: random.Random) -> ScheduleConfig:
    return ScheduleConfig(
        "threaded",
        prefetch_depth=dice.randint(1, 4),
        grad_slot_nbytes=dice.choice((1024, 8192, 2**20)),
    )


def train(program: Program, schedule: ScheduleConfig, sleeps: random.Random | None):
    """Losses and parameters; `sleeps` decides when threads and the main thread pause."""
    model = build_toy(program.dtype, depth=4, **MODELS[program.model])
    driver = None
    if sleeps is not None:
        pause = lambda: sleeps.choice([0.0, 0.0, sleeps.uniform(0.0, MOST_SLEEP_S)])  # noqa: E731
        driver = ThreadDriver(Timeline(CpuDevice()), 60.0, delay=pause)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: time.sleep(pause()))
            block.register_full_backward_hook(lambda *_: time.sleep(pause()))
    memory = program.memory if driver else 1.0
    trainer = EngineTrainer(model, program.sizes, schedule=schedule, driver=driver, memory=memory)
    losses = [trainer.step(step, count) for step, count in enumerate(program.micro_batches)]
    params = trainer.full_params()
    warned = trainer.runtime.gathers.warned
    # No view outlived its unit. Weights of several modules may need more than memory for one layer.
    assert warned <= {"growth"}, warned
    trainer.runtime.detach()
    assert trainer.runtime.num_places_in_use() == 0
    if driver is not None:
        driver.close()
    return losses, params


def run_many(num_runs: int, seed: int) -> int:
    for run in range(num_runs):
        dice = random.Random(f"{seed} {run}")  # the same program on every rank
        program, schedule = draw_program(dice), draw_schedule(dice)
        expected_losses, expected = train(program, ScheduleConfig("inline"), None)
        # The sleeps differ between ranks: nothing may depend on who is late.
        losses, params = train(program, schedule, random.Random())
        assert losses == expected_losses, (program, schedule)
        for name in expected:
            assert torch.equal(params[name], expected[name]), (program, schedule, name)
    return num_runs


def test_4_random_schedules_give_the_bits_of_the_inline_schedule_and_lose_no_place():
    assert run_ranks(run_many, 4, 4, 1) == [4] * 4


@pytest.mark.slow
def test_200_random_schedules_give_the_bits_of_the_inline_schedule_and_lose_no_place():
    assert run_ranks(run_many, 4, 200, 2, timeout_s=900) == [200] * 4
