# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the processor time that others used while something was measured. Must not know what."""

import os
import resource
import time

import torch
import torch.distributed as dist


class CpuUsage:
    """Processor time of the whole machine and of the ranks, from now on."""

    def __init__(self):
        self._begin = time.perf_counter(), _machine_cpu_s(), _own_cpu_s()

    def foreign_share(self) -> float:
        """What neither this run nor idling used, of all cores. Collective."""
        wall_s, machine_s, own_s = (
            now - then
            for now, then in zip((time.perf_counter(), _machine_cpu_s(), _own_cpu_s()), self._begin)
        )
        own = torch.tensor([own_s], dtype=torch.float64)
        dist.all_reduce(own)
        return max(0.0, machine_s - own.item()) / wall_s / (os.cpu_count() or 1)


def _machine_cpu_s() -> float:
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle, iowait


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
