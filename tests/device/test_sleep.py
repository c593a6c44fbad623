# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A sharded model that sleeps leaves nothing on the device, by torch's allocator, and goes on with
its bits."""

import torch
import torch.distributed as dist

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_runs import listening
from scripts.testbed.ranks import run_ranks
from tests.device.programs import CLIP, device_of_rank, is_emulated, new_adamw, new_toy
from tests.support.toy_models import toy_batch, toy_loss

CYCLES = 10
SIZES = (1, 2, 2)


def train_step(sharded: ShardedModel, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    sharded.zero_grad()
    loss = toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank()).to(device_of_rank()))
    loss.backward()
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    return loss.detach(), norm


def train(sleeps: bool) -> tuple[list[tuple[float, float]], list[int], list[int]]:
    """Loss and norm of each step; bytes on the device asleep, and then awake again."""
    model = new_toy().to(torch.bfloat16)
    sharded = shard(model, model.blocks, ShardSizes(*SIZES), new_adamw)
    seen, asleep, awake = [], [], []
    for step in range(CYCLES):
        loss, norm = train_step(sharded, step)
        seen.append((loss.item(), norm.item()))
        del loss, norm
        if not sleeps:
            continue
        sharded.sleep(2)
        if is_emulated():
            asleep.append(torch.cuda.memory_allocated())
        sharded.wake()
        if is_emulated():
            awake.append(torch.cuda.memory_allocated())
    sharded.close()
    return seen, asleep, awake


def test_ten_times_nothing_is_left_on_the_device_and_nothing_grows(worlds: DeviceWorlds):
    expected = [seen for seen, _, _ in run_ranks(train, 2, False)]
    for rank, (seen, asleep, awake) in enumerate(worlds.run(train, 2, True)):
        assert seen == expected[rank]
        assert asleep == [0] * CYCLES
        assert len(set(awake[1:])) == 1 and awake[1] > 0


def asleep_in_megatron(argv: list[str]) -> list[tuple[int, int]]:
    """Bytes on the device asleep and awake, at the beginning of each step but the first."""
    from tests.device.test_megatron import pretrain_each

    built, seen = [], []

    def begin_step() -> None:
        if not seen:
            seen.append((0, 0))
            return
        _, optimizer, _ = built[-1]
        optimizer.sleep(2)
        asleep = torch.cuda.memory_allocated()
        optimizer.wake()
        seen.append((asleep, torch.cuda.memory_allocated()))

    with listening(begin_step, lambda _: None, setup_model_and_optimizer=built.append):
        pretrain_each([argv], [Delays()])
    return seen[1:]
