# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is sent before the update, and taken back, is ordered before the update's own writes."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ScheduleConfig, ShardSizes, shard
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import device_of_rank, new_adamw, new_toy
from tests.support.toy_models import toy_batch, toy_loss


def train_and_call_the_last_block_before_each_update(
    sizes: Sequence[int], dtype: torch.dtype
) -> list[object]:
    """Losses and weights."""
    model = new_toy().to(dtype)
    schedule = ScheduleConfig(early_update="on")
    hidden = torch.ones(2, 4, model.embedding.embedding_dim, dtype=dtype, device=device_of_rank())
    seen: list[object] = []
    with shard(model, model.blocks, ShardSizes(*sizes), new_adamw, schedule=schedule) as sharded:
        for step in range(2):
            sharded.zero_grad()
            batch = toy_batch(step, 0, dist.get_rank()).to(device_of_rank())
            loss = toy_loss(sharded.model, batch)
            loss.backward()
            sharded.clip_grad_norm_(1e6)
            with torch.no_grad():
                # Its shard is awaited; the others, sent in the order of backward, come after it.
                sharded.model.blocks[-1](hidden)
            sharded.step()
            seen.append(loss.tolist())
        seen += [value.tolist() for _, value in sharded.full_params()]
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_of_one_block_leaves_no_shard_on_its_way_that_reads_what_the_update_writes(
    worlds: DeviceWorlds, dtype: torch.dtype
):
    case = ((1, 1, 2), dtype)
    expected = run_ranks(train_and_call_the_last_block_before_each_update, 2, *case)
    assert worlds.run(train_and_call_the_last_block_before_each_update, 2, *case) == expected
