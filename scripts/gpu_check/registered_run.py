# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of the check `registered`: trains, sleeps and replays, with and without windows."""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp import ScheduleConfig, ShardSizes, shard
from megatron_asynchzp.engine.comm.registered import RegisteredMemory
from megatron_asynchzp.engine.device import device_of
from scripts.gpu_check.toy import ToyShape, batch_of, loss_of, new_model
from scripts.testbed.log_lines import log_lines

_STEPS, _SLEEPS = 8, 10


def new_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def train(domain: int, shape: ToyShape, device: torch.device) -> dict[str, Any]:
    world = dist.get_world_size()
    model = new_model(shape, device)
    schedule = ScheduleConfig(registers_memory=domain)
    sizes = ShardSizes(world, world, world)
    with log_lines() as lines:
        sharded = shard(model, model.blocks, sizes, new_sgd, schedule=schedule)
    batch, losses, times = batch_of(shape, 0, dist.get_rank(), device), [], []

    def step() -> None:
        begin = time.perf_counter()
        sharded.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        sharded.step()
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)

    for _ in range(_STEPS):
        step()
    with torch.profiler.profile() as profile:
        step()
    names = {one.key for one in profile.key_averages()}
    asleep, wakes = [], []
    for _ in range(_SLEEPS):
        sharded.sleep(2)
        asleep.append(torch.cuda.memory_reserved())
        begin = time.perf_counter()
        sharded.wake()
        torch.cuda.synchronize()
        wakes.append(time.perf_counter() - begin)
        step()
    sharded.close()
    return {
        "losses": losses,
        "step_s": statistics.median(times[2:_STEPS]),
        "wake_s": statistics.median(wakes),
        # "nccl:all_gather" and such are what the host calls.
        "kernels": sorted(n for n in names if n.startswith("nccl") and ":" not in n),
        "asleep": asleep,
        "lines": [line for line in lines if "window" in line],
    }


def replays(device: torch.device) -> bool:
    """Return whether a captured all-gather into a window brings the values of each replay."""
    ranks = [*range(dist.get_world_size())]
    group: Any = dist.new_group(ranks)
    own = torch.zeros(1 << 18, device=device)
    registered = RegisteredMemory(device_of(own), len(ranks))
    new_registered = registered.allocator([group])
    if new_registered is None:
        return False
    full = new_registered(len(ranks) << 20).view(torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(full, own, group=group)
    are_right = []
    for turn in range(3):
        own.fill_(10.0 * turn + dist.get_rank())
        graph.replay()
        seen = full.view(len(ranks), -1)[:, 0].tolist()
        are_right.append(seen == [10.0 * turn + rank for rank in ranks])
    del graph
    registered.deregister(60.0)
    return all(are_right)


def main(path: str, is_large: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    shape = ToyShape(depth=4, width=2048) if int(is_large) else ToyShape(depth=2)
    record = {
        "plain": train(0, shape, device),
        "registered": train(dist.get_world_size(), shape, device),
        "replays": replays(device),
    }
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
