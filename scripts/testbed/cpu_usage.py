# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what processor time was used, and by whom."""

import os
import resource
import time

FOREIGN_LIMIT = 0.2  # of the machine, used by others: above it times are not reliable


def machine_cpu_s() -> float:
    """Seconds for which the machine's processors have worked, for any process, since it started."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle, iowait


def own_cpu_s() -> float:
    """Seconds for which they have worked for this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def foreign_share(machine_s: float, own_s: float, wall_s: float) -> float:
    """Return the share of all processors that others used in `wall_s` seconds."""
    return max(0.0, machine_s - own_s) / max(wall_s, 1e-9) / (os.cpu_count() or 1)


def idle_foreign_share(seconds: float = 2.0) -> float:
    """The share that others use while this process sleeps."""
    before = machine_cpu_s()
    time.sleep(seconds)
    return foreign_share(machine_cpu_s() - before, 0.0, seconds)


class CpuUsage:
    """Processor time of the whole machine and of the ranks, from now on."""

    def __init__(self):
        self._begin = time.perf_counter(), machine_cpu_s(), own_cpu_s()

    def foreign_share(self) -> float:
        """What neither this run nor idling used, of all cores. Collective."""
        now = time.perf_counter(), machine_cpu_s(), own_cpu_s()
        wall_s, machine_s, own_s = (a - b for a, b in zip(now, self._begin, strict=True))
        import torch
        import torch.distributed as dist

        own = torch.tensor([own_s], dtype=torch.float64)
        dist.all_reduce(own)
        return foreign_share(machine_s, own.item(), wall_s)
