# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is measured before the contenders: a step without communication, a step without computation,
whether the network is as slow as its model, and what others do to the machine meanwhile.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from scripts.testbed.contenders.megatron_run import train_megatron
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.cpu_usage import foreign_share, idle_foreign_share
from scripts.testbed.fabric.network import Network
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import Cluster

_PROBE_NUMEL = 250_000  # of a rank: a megabyte, about what a layer sends


@dataclass(frozen=True)
class Calibration:
    """Milliseconds of a step and of a probe of the network, measured and modelled; shares of the
    machine.

    emulated_ms: the delays of a step alone; compute_ms: of a step without communication, real
    arithmetic and the whole optimizer included; flat_ms, hierarchical_ms: of a step whose layers
    take no time, everything sharded over all ranks and parameters and gradients over a node.
    """

    emulated_ms: float
    compute_ms: float
    flat_ms: float
    hierarchical_ms: float
    probe_ms: float
    probe_model_ms: float
    idle_foreign: float
    foreign: float


def emulated_ms(workload: Workload, num_ranks: int) -> float:
    """The delays on a rank that trains its samples alone: forward once, backward twice."""
    return 3 * workload.layers * workload.layer_ms * workload.samples / num_ranks


def ring_all_gather_ms(profile: NetworkProfile, nodes: int, nbytes: int) -> float:
    """The modelled time of an all-gather over all ranks, `nbytes` from each: every step of the
    ring crosses between nodes once and takes as long as its slowest link."""
    inside = 0.0
    if (ranks := profile.ranks_per_node) > 1:  # all messages of a node share its fabric
        inside = (ranks - 1) * nbytes * 8e-6 / profile.intra_gbit + profile.intra_latency_us / 1e3
    between = 0.0
    if nodes > 1:
        between = nbytes * 8e-6 / profile.inter_gbit + profile.inter_latency_us / 1e3
    return (nodes * ranks - 1) * max(inside, between)


def step_ms(reports: Sequence[RankReport]) -> float:
    """Median of the timed steps of the first rank."""
    return 1e3 * statistics.median(reports[0].step_s)


def foreign_of(reports: Sequence[RankReport]) -> float:
    """The share of the machine that others used in the timed steps of a run."""
    own_s = sum(report.own_cpu_s for report in reports)
    return foreign_share(reports[0].machine_cpu_s, own_s, reports[0].wall_s)


def busy_of(reports: Sequence[RankReport]) -> float:
    """The share of the machine that was used in the timed steps of a run, by any process."""
    return foreign_share(reports[0].machine_cpu_s, 0.0, reports[0].wall_s)


def compute_alone(
    cluster: Cluster, workload: Workload, micro_batch: int, timeout_s: float
) -> list[RankReport]:
    """A step of every rank without communication."""
    # Ranks that do not know each other begin at different times: none may be timed while another
    # one still starts.
    samples, warm_up = workload.samples // cluster.num_ranks, 3 * workload.warm_up
    alone = replace(workload, samples=samples, warm_up=warm_up)
    return cluster.run(train_megatron, alone, micro_batch, (), timeout_s=timeout_s, is_joined=False)


def calibrate(cluster: Cluster, workload: Workload, timeout_s: float) -> Calibration:
    """Four short runs on the cluster that the contenders will have."""
    idle, world, node = idle_foreign_share(), cluster.num_ranks, cluster.ranks_per_node
    batch = workload.samples // world
    computing = compute_alone(cluster, workload, batch, timeout_s)
    instant = replace(workload, layer_ms=0.0)
    flat, hierarchical = (
        cluster.run(train_megatron, instant, batch, size_flags(sizes), timeout_s=timeout_s)
        for sizes in ((world, world, world), (node, node, world))
    )
    probe = cluster.run(probe_all_gather, timeout_s=timeout_s)
    profile = replace(cluster.profile, ranks_per_node=node)
    return Calibration(
        emulated_ms=emulated_ms(workload, world),
        compute_ms=step_ms(computing),
        flat_ms=step_ms(flat),
        hierarchical_ms=step_ms(hierarchical),
        probe_ms=max(probe),
        probe_model_ms=ring_all_gather_ms(profile, cluster.nodes, 4 * _PROBE_NUMEL),
        idle_foreign=idle,
        foreign=max(foreign_of(run) for run in (flat, hierarchical)),
    )


def probe_all_gather(network: Network) -> float:
    """Milliseconds, the median of five."""
    mine = torch.zeros(_PROBE_NUMEL)
    everybody = torch.zeros(_PROBE_NUMEL * dist.get_world_size())
    times_ms = []
    for _ in range(6):
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_gather_into_tensor(everybody, mine)
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    return statistics.median(times_ms[1:])
