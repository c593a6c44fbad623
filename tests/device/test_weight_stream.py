# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Weights and deltas that leave a device are those of a CPU, through a sleep as well."""

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ShardSizes, apply_delta, shard
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import CLIP, device_of_rank, new_adamw, new_toy
from tests.support.toy_models import toy_batch, toy_loss

Values = dict[str, list[float]]


def follow(sizes: tuple[int, int, int], receivers: list[int] | None) -> list[Values]:
    """A copy by deltas, and the whole weights in fp32, after each step."""
    model = new_toy().to(torch.bfloat16)
    sharded = shard(model, model.blocks, ShardSizes(*sizes), new_adamw)
    copy = {name: value.clone() for name, value in sharded.stream_weights(receivers=receivers)}
    sharded.mark_weights("copy")
    seen: list[Values] = []
    for step in range(3):
        sharded.zero_grad()
        toy_loss(model, toy_batch(step, 0, dist.get_rank()).to(device_of_rank())).backward()
        sharded.clip_grad_norm_(CLIP)
        sharded.step()
        if step == 1:
            sharded.sleep(2)
            sharded.wake()
            continue
        for delta in sharded.stream_changes("copy", receivers=receivers):
            apply_delta(copy, delta)
        sharded.mark_weights("copy")
        seen.append({name: value.tolist() for name, value in copy.items()})
        whole = sharded.stream_weights(receivers=receivers, dtype=torch.float32)
        seen.append({name: value.tolist() for name, value in whole})
    whole = {name: value.tolist() for name, value in sharded.full_params()}
    assert not copy or seen[-2] == whole
    sharded.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, receivers", [((2, 2, 2), None), ((2, 1, 2), [1]), ((1, 1, 2), [0])]
)
def test_weights_and_deltas_that_leave_a_device_are_those_of_a_cpu(
    worlds: DeviceWorlds, sizes, receivers
):
    assert worlds.run(follow, 2, sizes, receivers) == run_ranks(follow, 2, sizes, receivers)
