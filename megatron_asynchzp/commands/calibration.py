# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures links and computing: medians of several repetitions, of the slowest rank."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import all_gather_flat
from megatron_asynchzp.engine.comm.registered import RegisteredMemory
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.planner.cluster import GB, Cluster, Link, Ring

_MATRIX, _CPU_MATRIX = 8192, 512


class _Clock:
    def __init__(self, device: torch.device, repetitions: int):
        self._device, self._repetitions = device, repetitions

    def seconds(self, run: Callable[[], object]) -> float:
        run()  # communicators and kernels are made in the first call
        times: list[float] = []
        for _ in range(self._repetitions):
            dist.barrier()
            self._finish()
            begin = time.perf_counter()
            run()
            self._finish()
            slowest = torch.tensor(time.perf_counter() - begin, device=self._device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
        return statistics.median(times)

    def _finish(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def measured_link(link: Link, ring: Ring, times: Sequence[tuple[int, float]]) -> Link:
    """Fit latency, speed and efficiency of `link` to measured all-gathers along `ring`.

    This inverts `Ring.turn`: the smallest all-gather is latency alone, the rest of the others' time
    is transfer, and ranks that share a link fill each other's latencies.

    Args:
        link: The link, with its cards and whether ranks share it.
        ring: The ring of the all-gathers; all such rings ran at the same time.
        times: (bytes of the whole tensor, seconds), smallest first.
    """
    hops = ring.size - 1
    latency_s = times[0][1] / hops
    sharing = ring.sharing_between(link) if ring.crosses_nodes else ring.sharing_inside(link)
    speeds: list[tuple[float, float]] = []
    for nbytes, seconds in times[1:]:
        alone_s = (seconds - hops * latency_s) * max(1.0, sharing)
        transfer_s = max(min(seconds - latency_s, alone_s), 0.1 * seconds)
        message = nbytes / ring.size
        speeds.append((message, sharing * hops * message / transfer_s))
    best = max(speed for _, speed in speeds)
    curve = tuple((message, speed / best) for message, speed in speeds)
    return replace(link, gb_s=best / GB, latency_us=1e6 * latency_s, start_us=0.0, efficiency=curve)


def _gather_times(
    group: dist.ProcessGroup, sizes: Sequence[int], memory: torch.Tensor, clock: _Clock
) -> list[tuple[int, float]]:
    times: list[tuple[int, float]] = []
    for nbytes in sizes:
        numel = max(1, nbytes // dist.get_world_size(group))
        shard, full = memory.new_zeros(numel), memory[: numel * dist.get_world_size(group)]
        seconds = clock.seconds(partial(all_gather_flat, full, shard, group=group))
        times.append((full.numel(), seconds))
    return times


def _group_of(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in groups}
    own = next(group for ranks, group in made.items() if rank in ranks)
    return cast(dist.ProcessGroup, own)  # anything else is of groups without this rank


def calibrate(
    cluster: Cluster,
    sizes: Sequence[int],
    repetitions: int = 5,
    device: torch.device | None = None,
    registers: bool = False,
) -> Cluster:
    """Return `cluster` with measured links and computing. Collective over the whole world.

    The world fills the cluster's nodes. sizes: bytes of the whole tensor, smallest first. The
    efficiency is above 1 if the device exceeds its stated peak. registers: gather within a
    node into memory that is registered with NCCL.
    """
    rank, per_node = dist.get_rank(), cluster.ranks_per_node
    if device is None and dist.get_backend() == "gloo":
        device = torch.device("cpu")
    device = device or torch.accelerator.current_accelerator()
    assert device is not None, "a backend other than gloo has a device"
    is_cpu = device.type == "cpu"
    clock, numel = _Clock(device, repetitions), max(*sizes, cluster.num_ranks)
    memory = torch.empty(numel, dtype=torch.uint8, device=device)
    if per_node > 1:
        nodes = [range(node * per_node, (node + 1) * per_node) for node in range(cluster.nodes)]
        group = _group_of(rank, nodes)
        registered = RegisteredMemory(device_of(memory), per_node if registers else 0)
        new_registered = registered.allocator([group])
        full = new_registered(numel) if new_registered else memory
        times = _gather_times(group, sizes, full, clock)
        registered.deregister(60.0)
        ring = Ring.of_axis(per_node, 1, per_node)
        cluster = replace(cluster, inside=measured_link(cluster.inside, ring, times))
    if cluster.nodes > 1:
        across = [range(place, cluster.num_ranks, per_node) for place in range(per_node)]
        times = _gather_times(_group_of(rank, across), sizes, memory, clock)
        ring = Ring.of_axis(cluster.nodes, per_node, per_node)
        cluster = replace(cluster, between=measured_link(cluster.between, ring, times))
    side = _CPU_MATRIX if is_cpu else _MATRIX
    matrix = torch.ones(
        side, side, device=device, dtype=torch.float32 if is_cpu else torch.bfloat16
    )
    reached = 2 * side**3 / clock.seconds(lambda: matrix @ matrix)
    efficiency = reached / (1e12 * cluster.device.tflops)
    return replace(cluster, device=replace(cluster.device, efficiency=efficiency))
