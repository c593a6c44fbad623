# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that compute a part of themselves on a side stream (Megatron's shared experts beside the
routed ones): no slot is read or rewritten too early, whichever stream a gradient comes from."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ScheduleConfig, ShardSizes, shard
from scripts.gpu_check.toy import ToyShape, batch_of, loss_of, new_model
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from tests.device.programs import device_of_rank, new_adamw
from tests.support.engine import nested_sizes
from tests.support.selection import slow_unless

# From how many bytes on a gradient is taken by itself.
LARGE = "megatron_asynchzp.engine.zero.taken_grads.LARGE_GRAD_NBYTES"
STEPS = 2


@dataclass(frozen=True)
class Run:
    """What a seed stands for."""

    config: ScheduleConfig
    sizes: tuple[int, int, int]
    shape: ToyShape
    micro_batches: int
    large_nbytes: int

    @classmethod
    def draw(cls, seed: int, world_size: int, has_side_stream: bool) -> "Run":
        dice = random.Random(seed)
        depth, slot = dice.randint(0, 2), dice.choice((64, 1024, 2**20))
        dtype = dice.choice((torch.bfloat16, torch.float32))
        return cls(
            ScheduleConfig("main-thread", depth, grad_slot_nbytes=slot),
            dice.choice(nested_sizes(world_size)),
            ToyShape(8, 2, 11, has_side_stream=has_side_stream, dtype=dtype),
            dice.randint(1, 2),
            dice.choice((64, 2**20)),
        )


def train(run: Run) -> list[float]:
    """The losses of this rank. The model is sharded on a stream of its own, as Megatron's
    get_model wraps it: nodes of the graph that are made there belong to that stream."""
    device, wrapping = device_of_rank(), torch.cuda.Stream()
    model = new_model(run.shape, device)
    # Held until their stream has waited for the one that copies them.
    initial = [param.data for param in model.parameters()]
    wrapping.wait_stream(torch.cuda.current_stream())
    with mock.patch(LARGE, run.large_nbytes):
        with torch.cuda.stream(wrapping):
            sharded = shard(
                model, model.blocks, ShardSizes(*run.sizes), new_adamw, schedule=run.config
            )
        torch.cuda.current_stream().wait_stream(wrapping)
        del initial
        losses = []
        with sharded:
            for step in range(STEPS):
                sharded.zero_grad()
                for index in range(run.micro_batches):
                    sharded.set_is_last_micro_batch(index == run.micro_batches - 1)
                    batch = batch_of(run.shape, step, 10 * dist.get_rank() + index, device)
                    loss = loss_of(model, batch) / run.micro_batches
                    loss.backward()
                    losses.append(loss.detach())
                sharded.step()
    return [loss.item() for loss in losses]


def train_with_and_without(seeds: Sequence[int]) -> list[tuple[list[float], list[float]]]:
    """Of each seed the losses with the side stream, and of the same layers on one stream."""
    worlds = dist.get_world_size()
    return [
        (train(Run.draw(seed, worlds, True)), train(Run.draw(seed, worlds, False)))
        for seed in seeds
    ]


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [slow_unless(True, 2, range(2), id="fast"), slow_unless(False, 4, range(2, 100), id="many")],
)
def test_gradients_from_a_side_stream_are_neither_reduced_too_early_nor_overwritten(
    worlds: DeviceWorlds, world_size: int, seeds: Sequence[int]
):
    delays = Delays("uniform", seed=1, longest_us=50)
    ranks = worlds.run(
        train_with_and_without, world_size, seeds, delays=delays, timeout_s=60 + 5 * len(seeds)
    )
    for rank in ranks:
        for seed, (beside, alone) in zip(seeds, rank, strict=True):
            assert beside == alone, seed
