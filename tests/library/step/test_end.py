# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A process that trains one model after another keeps nothing of those that are closed."""

import contextlib
import gc
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from tests.support.selection import slow_unless
from tests.support.world import on_ranks


def train_with_shard(sizes: ShardSizes) -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 600), nn.Linear(600, 50))
    units = list(model)
    sharded = shard(model, units=units, sizes=sizes, optimizer=torch.optim.AdamW)
    for _ in range(2):
        sharded.zero_grad()
        model(torch.arange(32)).sum().backward()
        sharded.step()
    sharded.close()
    for group in [
        group for group in dist.distributed_c10d._world.pg_map if group != dist.group.WORLD
    ]:
        dist.destroy_process_group(group)


def train_in_megatron(_: ShardSizes) -> None:
    from scripts.testbed.megatron_runs import gpt_args, run_pretrain, tear_down

    with contextlib.redirect_stdout(io.StringIO()):
        run_pretrain(gpt_args("--use-asynchzp", "--train-iters", "2"))
        tear_down()


def count_threads(train, sizes: ShardSizes) -> list[int]:
    """The threads of this rank, those of its communicators among them, after each run."""
    counts = []
    for _ in range(2):
        train(sizes)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted on Linux")
@pytest.mark.parametrize(
    "train, sizes",
    [
        (train_with_shard, ShardSizes(2, 2, 2)),
        slow_unless(False, train_in_megatron, ShardSizes(2, 2, 2)),
    ],
)
def test_the_communicators_of_a_closed_run_are_gone_when_torch_destroys_its_groups(train, sizes):
    for first, second in on_ranks(count_threads, 2, train, sizes):
        assert first == second
