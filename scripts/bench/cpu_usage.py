# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the processor time that others used while ranks measured something together. Must not know
what."""

import time

import torch
import torch.distributed as dist

from megatron_asynchzp.testbed.cpu_usage import foreign_share, machine_cpu_s, own_cpu_s


class CpuUsage:
    """Processor time of the whole machine and of the ranks, from now on."""

    def __init__(self):
        self._begin = time.perf_counter(), machine_cpu_s(), own_cpu_s()

    def foreign_share(self) -> float:
        """What neither this run nor idling used, of all cores. Collective."""
        now = time.perf_counter(), machine_cpu_s(), own_cpu_s()
        wall_s, machine_s, own_s = (a - b for a, b in zip(now, self._begin, strict=True))
        own = torch.tensor([own_s], dtype=torch.float64)
        dist.all_reduce(own)
        return foreign_share(machine_s, own.item(), wall_s)
