# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of the engine between those of a model that communicates itself, as with tensor and
context parallelism: launched by the threads that compute they have one order on all ranks, and no
number of hardware queues closes a circle."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from tests.device.programs import CLIP, Seen, new_adamw, new_toy, steps_of
from tests.support.live_launches import ENV, LaunchRecord
from tests.support.selection import slow_unless
from tests.support.toy_models import Block

# Of four ranks: those that share a model, and those that share what is sharded.
FOREIGN, SHARDING = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
LONGEST_PAUSE_S = 2e-3
_FOREIGN = "all_reduce", "[[4, 8, 16]]"

Launched = tuple[int, str, str]
"""A communicator's number, in the order of their first launches; what it did; sizes of inputs."""


class _Sum(torch.autograd.Function):
    """The mean over the ranks of a model, forward and backward; on a stream, where there is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, stream: Any) -> torch.Tensor:
        ctx.group, ctx.stream = group, stream
        return _mean(x, group, stream)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _mean(grad, ctx.group, ctx.stream), None, None


def _mean(x: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream) -> torch.Tensor:
    time.sleep(max(0.0, random.uniform(-9, 1)) * LONGEST_PAUSE_S)  # now and then the host is late
    main = torch.cuda.current_stream()
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        mean = x / group.size()
        dist.all_reduce(mean, group=group)
        mean.record_stream(main)
    main.wait_stream(stream)
    x.record_stream(stream)
    return mean


class _Communicating(nn.Module):
    """A block between two sums: one on the stream that computes, one on another."""

    def __init__(self, block: Block, group: dist.ProcessGroup):
        super().__init__()
        self.block, self._group, self._side = block, group, torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Sum.apply(x, self._group, torch.cuda.current_stream())
        return _Sum.apply(self.block(x), self._group, self._side)


def train_between_foreign(laws: list[Delays]) -> list[tuple[Seen, list[Launched]]]:
    """Under each law what was seen, and every launch of this rank."""
    from scripts.testbed.device import inside

    rank = dist.get_rank()
    foreign, sharding = map(_own_group, (FOREIGN, SHARDING))
    results = []
    for delays in laws:
        random.seed(f"{delays.seed} {rank}")
        inside.set_delays(delays, rank, dist.get_world_size())
        record = LaunchRecord()
        seen, numbers = _train(foreign, sharding), dict[str, int]()
        launches = [
            (numbers.setdefault(launch.group, len(numbers)), launch.operation, launch.sizes)
            for launch in record.take()
        ]
        results.append((seen, launches))
    return results


def _own_group(parts: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts) if dist.get_rank() in ranks)


def _train(foreign: dist.ProcessGroup, sharding: dist.ProcessGroup) -> Seen:
    model = new_toy()
    model.blocks = nn.ModuleList(_Communicating(block, foreign) for block in model.blocks)
    with shard(model, model.blocks, ShardSizes(2, 2, 2), new_adamw, group=sharding) as sharded:

        def end() -> torch.Tensor:
            norm = sharded.clip_grad_norm_(CLIP)
            sharded.step()
            return norm

        return steps_of(model, 2, sharded.zero_grad, sharded.set_is_last_micro_batch, end)


@pytest.mark.parametrize("num_queues", ["1", slow_unless(False, "8"), slow_unless(False, "32")])
def test_all_collectives_have_one_order_on_all_ranks_and_no_number_of_queues_closes_a_circle(
    worlds: DeviceWorlds, num_queues: str
):
    env = ENV | {"CUDA_DEVICE_MAX_CONNECTIONS": num_queues}
    laws = [Delays(), Delays("uniform", 1, 100)]
    ranks = worlds.run(train_between_foreign, 4, laws, env=env)
    _, order = ranks[0][0]
    foreign = [index for index, launch in enumerate(order) if launch[1:] == _FOREIGN]
    # The engine's are launched between the foreign ones.
    assert sum(later - index > 1 for index, later in zip(foreign, foreign[1:])) > 20
    for rank in ranks:
        for delays, (seen, launches) in zip(laws, rank, strict=True):
            assert seen == rank[0][0], str(delays)
            assert launches == order, str(delays)
