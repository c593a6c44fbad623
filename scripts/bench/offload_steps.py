# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank of bench_offload measures."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from megatron_asynchzp.sharding.host_room import room_nbytes
from scripts.testbed.contenders.adam import new_adamw
from scripts.testbed.contenders.delayed_model import DelayedModel, ModelSize, batch_of
from scripts.testbed.profile import NetworkProfile

_STEPS = 3  # the last one is measured
_SIZES = (2, 2, 4)
_STATES_NBYTES = 12  # of an element: the main parameter and two moments, fp32


def measure(
    size: ModelSize, tokens: int, comm: float, links: Sequence[float], fractions: Sequence[float]
) -> list[dict[str, Any]]:
    """By link and fraction. tokens: that a micro-batch of a rank counts for. comm: time to gather a
    block over the ranks of a node, or its shard over the nodes, and links: time to copy the states
    of a block that a rank has one way, each over the time of a forward of a block."""
    return [
        _measured(size, tokens, comm, link, fraction)
        for link, fraction in product(links, fractions)
    ]


def _measured(
    size: ModelSize, tokens: int, comm: float, link: float, fraction: float
) -> dict[str, Any]:
    from scripts.testbed.device import inside

    batches = [_batch(size, number) for number in range(_STEPS * size.micro_batches)]
    forward_s, world_size = 1e-3 * size.block_ms, dist.get_world_size()
    gbit = 8e-9 * (size.block_nbytes // 2) / (comm * forward_s)  # in bf16
    network = NetworkProfile("device", gbit / 2, gbit, ranks_per_node=world_size // 2)
    states_nbytes = _STATES_NBYTES * size.block_nbytes / 4 / world_size
    inside.state_time(network, 8e-9 * states_nbytes / (link * forward_s))
    model = DelayedModel(size).to(torch.device("cuda"), torch.bfloat16)
    ends: list[torch.cuda.Event] = []
    with shard(model, model.blocks, ShardSizes(*_SIZES), new_adamw, offload=fraction) as sharded:
        for step in range(_STEPS):
            loss = _train_step(sharded, batches[step::_STEPS])
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        torch.cuda.synchronize()
        step_ms = torch.tensor(ends[-2].elapsed_time(ends[-1]), device="cuda")
        dist.all_reduce(step_ms, dist.ReduceOp.MAX)
        units = [unit for unit in sharded.runtime.units if unit.is_trained]
        away = [_STATES_NBYTES * unit.optim_range.numel for unit in units if unit.is_on_host]
        all_nbytes = sum(_STATES_NBYTES * unit.optim_range.numel for unit in units)
    tokens = tokens * size.micro_batches * world_size
    return {
        "link": link,
        "fraction": fraction,
        "micro_batches": size.micro_batches,
        "on_device": round((all_nbytes - sum(away) + room_nbytes(away)) / all_nbytes, 4),
        "step_ms": round(step_ms.item(), 3),
        "tokens_per_s": round(1e3 * tokens / step_ms.item()),
        "loss": loss,
    }


def _batch(size: ModelSize, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On the device before its clock starts: what a loader brings is not what is measured."""
    x, y = batch_of(size, number, dist.get_rank())
    x, y = (one.detach().to(torch.device("cuda"), torch.bfloat16) for one in (x, y))
    return x.requires_grad_(), y


def _train_step(sharded: Any, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    sharded.zero_grad()
    losses = []
    for index, (x, y) in enumerate(batches):
        sharded.set_is_last_micro_batch(index == len(batches) - 1)
        loss = nn.functional.mse_loss(sharded.model(x), y)
        loss.backward()
        losses.append(loss.detach())
    sharded.clip_grad_norm_(1.0)
    sharded.step()
    return torch.stack(losses).mean().item()
