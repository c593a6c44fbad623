# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a contender on an emulated cluster, and records the load of the machine meanwhile."""

import os
from pathlib import Path

from scripts.testbed.contenders.megatron_run import train_megatron
from scripts.testbed.contenders.side_by_side import Contender
from scripts.testbed.contenders.torch_run import missing, train_torch
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.cpu_usage import foreign_share
from scripts.testbed.ranks import Cluster, RankFailure, preload

RUN_LIMIT_S = 120.0  # a contender's run takes about 15 on an idle machine


def prepare_environment() -> None:
    """What all ranks inherit. Before the first run of a process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # Megatron-FSDP refuses 1
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    preload(["scripts.testbed.preload_megatron"] + ["deepspeed"] * (not missing("deepspeed")))


def measure(
    cluster: Cluster, workload: Workload, one: Contender, timeout_s: float, log: Path
) -> dict:
    """The record of one run, or {"reason": why there is none}. log: gets what the ranks print."""
    if one.torch_system:
        call: tuple = train_torch, workload, one.torch_system
    else:
        call = train_megatron, workload, one.micro_batch, one.flags
    try:
        reports = cluster.run(*call, timeout_s=timeout_s, log=log)
    except RankFailure as failure:
        with log.open("a") as file:
            file.write(f"{one.name}\n{failure}\n")
        return {"reason": f"failed: {failure.reason[:160]}"}
    return _summed(reports, cluster.ranks_per_node, workload.steps)


def _summed(reports: list[RankReport], ranks: int, steps: int) -> dict:
    """Of all ranks: times of the first, the fullest node and the fullest rank."""
    by_node = [
        sum(report.node_nbytes for report in reports[first : first + ranks])
        for first in range(0, len(reports), ranks)
    ]
    held = [r.state_nbytes for r in reports if r.state_nbytes is not None]
    peaks = [r.peak_nbytes for r in reports if r.peak_nbytes is not None]
    exposed = [r.exposed_s for r in reports if r.exposed_s is not None]
    return {
        "step_ms": [1e3 * value for value in reports[0].step_s],
        "losses": next(r.losses for r in reports if None not in r.losses),
        "node_nbytes": max(by_node) / steps,
        "state_nbytes": max(held, default=None),
        "peak_nbytes": max(peaks, default=None),
        "exposed_ms": 1e3 * max(exposed) if exposed else None,
        "optimizer_ms": 1e3 * max(r.optimizer_s for r in reports),
        "host_waits": max(r.host_waits for r in reports) / steps,
        "foreign": _share_of_others(reports, sum(report.own_cpu_s for report in reports)),
        "busy": _share_of_others(reports, 0.0),
    }


def _share_of_others(reports: list[RankReport], own_s: float) -> float:
    """Return the share of the machine that was used in the timed steps beyond `own_s`."""
    return foreign_share(reports[0].machine_cpu_s, own_s, reports[0].wall_s)
