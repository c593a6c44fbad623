# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs configurations one after another in the ranks of one emulated cluster, and probes its links
as calibrate does.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_asynchzp.commands.calibration import calibrate
from megatron_asynchzp.planner.cluster import Cluster
from scripts.bench.planner_points import EmulatedCluster, Point
from scripts.testbed.contenders.layer_delay import layers_take
from scripts.testbed.fabric.network import Network
from scripts.testbed.megatron_flags import flags_of
from scripts.testbed.megatron_runs import run_pretrain
from scripts.testbed.ranks import Cluster as Ranks

_WARM_UP, _STEPS = 2, 3
_PROBES = (2**6, 2**20)  # bytes of the tensors that are gathered; the first takes no transfer
_START_S, _RUN_S = 60.0, 60.0


def measured(
    network: EmulatedCluster,
    points: Sequence[Point],
    log: Path | None = None,
    warm_up: int = _WARM_UP,
    steps: int = _STEPS,
) -> list[list[float]]:
    """Seconds of the timed steps of each point. log: gets what the ranks print."""
    runs = [
        # What the last step leaves in flight is part of none.
        ([*point.argv, *flags_of({"train-iters": warm_up + steps + 1})], point.layer_ms)
        for point in points
    ]
    limit_s = _START_S + _RUN_S * len(points)
    return _on_ranks(network, limit_s, log, _measure, runs, warm_up)


def hop_us(network: EmulatedCluster, log: Path | None = None) -> dict[str, float]:
    """Microseconds that a small message takes from a rank to the next beyond the modelled latency,
    inside a node and between nodes."""
    plain = network.planned(1.0)
    found = _on_ranks(network, _START_S, log, _probe, plain)
    return {
        link: max(0.0, getattr(found, link).latency_us - getattr(plain, link).latency_us)
        for link in ("inside", "between")
    }


def _on_ranks(
    network: EmulatedCluster, limit_s: float, log: Path | None, fn: Callable, *args: Any
) -> Any:
    """What the first rank returns of `fn(fabric, *args)`."""
    ranks = Ranks(network.nodes, network.ranks_per_node, network.profile)
    more = {} if log is None else {"log": log}
    return ranks.run(fn, *args, timeout_s=limit_s, **more)[0]


# ---- on the ranks


def _probe(_: Network, cluster: Cluster) -> Cluster:
    return calibrate(cluster, _PROBES, device=torch.device("cpu"))


def _measure(
    _: Network, runs: Sequence[tuple[list[str], float]], warm_up: int
) -> list[list[float]]:
    steps: list[list[float]] = []
    for argv, layer_ms in runs:
        with layers_take(layer_ms):
            begins_s = run_pretrain(argv).begins_s[warm_up:]
        steps.append([after - before for before, after in pairwise(begins_s)])
    return steps
