# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that compute a part of themselves on a side stream (Megatron's shared experts beside the
routed ones): no slot is read or rewritten too early, whichever stream a gradient comes from."""

import random
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from megatron_asynchzp.schedule import ScheduleConfig
from tests.support.engine import EngineTrainer, nested_sizes
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import WORLD_SIZE, delayed_driver, recorded_groups
from tests.support.selection import slow_unless
from tests.support.side_stream import SIDE, AutogradStreams, use_side_stream
from tests.support.toy_models import ToyLM

# From how many bytes on a gradient is taken by itself.
LARGE = "megatron_asynchzp.zero.autograd.LARGE_GRAD_NBYTES"


@dataclass(frozen=True)
class Run:
    """What a seed stands for."""

    config: ScheduleConfig
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    micro_batches: int
    steps: int
    large_nbytes: int

    @classmethod
    def draw(cls, seed: int) -> "Run":
        dice = random.Random(seed)
        depth, slot = dice.randint(0, 2), dice.choice((64, 1024, 2**20))
        return cls(
            ScheduleConfig("main-thread", depth, grad_slot_nbytes=slot),
            dice.choice(nested_sizes(WORLD_SIZE)),
            dice.choice((torch.bfloat16, torch.float32)),
            dice.randint(1, 2),
            dice.choice((1, 1, 2)),
            dice.choice((64, 2**20)),
        )


def train(run: Run, seed: int) -> RecordingDevice:
    """A few steps of two layers, with what autograd does about streams on a device."""
    device = RecordingDevice()
    streams = AutogradStreams(device)
    with device.recording(), streams.applied(), mock.patch(LARGE, run.large_nbytes):
        torch.manual_seed(seed)
        model = use_side_stream(ToyLM(vocab=11, width=8, depth=2), streams).to(run.dtype)
        streams.watch(model)
        driver = delayed_driver(device, run.config, seed)
        groups = recorded_groups(run.sizes, rank=5)
        with streams.wrapping(model):
            trainer = EngineTrainer(
                model,
                run.sizes,
                schedule=run.config,
                driver=driver,
                groups=groups,
                backward=streams.backward,
            )
        for step in range(run.steps):
            trainer.local_step(step, run.micro_batches)
        trainer.runtime.close()
        driver.close()
    return device


def races(device: RecordingDevice) -> list[str]:
    assert any(access.stream == SIDE for access in device.latest_accesses())
    return device.races


@pytest.mark.parametrize(
    "seeds", [slow_unless(True, range(12)), slow_unless(False, range(12, 200))]
)
def test_gradients_from_a_side_stream_are_neither_reduced_too_early_nor_overwritten(seeds):
    for seed in seeds:
        assert races(train(Run.draw(seed), seed)) == [], seed


def test_a_gradient_that_is_added_on_the_side_stream_is_seen_to_race(monkeypatch):
    """With G = 1 it is added to main_grad where it is taken; else it is packed later, on the main
    stream, when that has waited for the other one."""

    class OnTheSide(AutogradStreams):
        def stream_of_hook(self, param: torch.Tensor) -> str:
            return SIDE if param.dim() == 2 else super().stream_of_hook(param)

    monkeypatch.setattr("tests.zero.test_side_streams.AutogradStreams", OnTheSide)
    for seed in range(5):
        run = replace(Run.draw(seed), large_nbytes=64)
        assert bool(races(train(run, seed))) == (run.sizes[1] == 1), run
