# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank of `python -m scripts.bench.graph_host_cost` measures: host time of a layer and
micro-batch, with CUDA graphs around sharded layers and without, on the emulated device."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.plan import plan_units

PLAIN, FSDP2, EAGER, GRAPHED = "one rank, eager", "FSDP2, eager", "ours, eager", "ours, graphs"
SYSTEMS = (PLAIN, FSDP2, EAGER, GRAPHED)
_LAYERS, _WARM_UP, _STEPS, _WIDTH = 8, 3, 15, 16


class _Layer(nn.Module):
    def __init__(self, num_params: int):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_params // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


class _Model(nn.Module):
    def __init__(self, num_params: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer(num_params) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def measure(systems: Sequence[str], num_params: int) -> dict[str, dict[str, float]]:
    """By system: microseconds of forward and of backward that the threads which issue them take of
    a core for a layer and micro-batch, medians over the steps, and the loss of the last one."""
    return {system: _measured(system, num_params) for system in systems}


def _measured(system: str, num_params: int) -> dict[str, float]:
    model = _Model(num_params).cuda()
    begin: Callable[[], Any] = model.zero_grad
    runtime: HZPRuntime | None = None
    if system == FSDP2:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif system != PLAIN:
        runtime = _sharded(model, is_seated=system == GRAPHED)
        begin = runtime.zero_grads
    times, loss = [], torch.zeros(())
    for step in range(_WARM_UP + _STEPS):
        if system == GRAPHED and step == 1 and runtime is not None:
            samples = tuple((_batch().requires_grad_(),) for _ in model.layers)
            with runtime.rehearsing():
                torch.cuda.make_graphed_callables(tuple(model.layers), samples)
        begin()
        with nullcontext() if runtime is None else runtime.no_sync():
            loss, *own = _timed_step(model)
        torch.cuda.synchronize()
        times.append(own)
    if runtime is not None:
        runtime.sync_grads()
        runtime.detach()
    forward_us, backward_us = (
        1e6 * statistics.median(one) / _LAYERS for one in zip(*times[_WARM_UP:], strict=True)
    )
    found = {"forward_us": forward_us, "backward_us": backward_us}
    return found | {"total_us": forward_us + backward_us, "loss": loss.item()}


def _sharded(model: _Model, is_seated: bool) -> HZPRuntime:
    world_size = dist.get_world_size()
    topology = ShardTopology(world_size, dist.get_rank(), ShardSizes(*3 * (world_size,)))
    groups = ShardGroups.create(topology, dist.group.WORLD, timedelta(seconds=60))
    plans = [replace(plan, is_seated=is_seated) for plan in plan_units(model, [*model.layers])]
    return HZPRuntime(model, plans, {"dense": groups}, ScheduleConfig(checks_order=False))


def _batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * _WIDTH, device="cuda").view(4, _WIDTH)


def _timed_step(model: nn.Module) -> tuple[torch.Tensor, float, float]:
    """Backward runs on a thread of autograd's, whose own clock hooks read."""
    seen: list[float] = []

    def note(_grad: torch.Tensor) -> None:
        seen.append(time.thread_time())

    x = _batch().requires_grad_()
    x.register_hook(note)
    start = time.thread_time()
    y = model(x)
    forward = time.thread_time() - start
    y.register_hook(note)
    loss = y.square().mean()
    loss.backward()
    return loss.detach(), forward, seen[1] - seen[0]
