# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a calibration makes of times: a link that gives them back."""

import tomllib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.commands import calibration
from megatron_asynchzp.commands.calibration import calibrate, measured_link
from megatron_asynchzp.planner.cluster import Cluster, Device, Link, Ring
from megatron_asynchzp.planner.cluster_files import cluster_toml, read_cluster
from scripts.testbed.ranks import run_ranks


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nodes, stride, is_inside", [(1, 1, True), (4, 8, False)])
def test_a_measured_link_gives_back_the_times_that_it_was_measured_by(
    nodes, stride, is_inside, shared
):
    true = Link(40.0, latency_us=7.0, cards=2, efficiency=((1e5, 0.3), (1e7, 1.0)), shared=shared)
    cluster = Cluster("c", nodes, 8, Device(100, 80), true, true)
    ring = Ring.of_axis(8 if is_inside else nodes, stride, 8)
    times = [(nbytes, ring.turn(nbytes, cluster).alone_s) for nbytes in (8, 2**20, 2**24, 2**30)]
    found = measured_link(Link(1.0, cards=2, shared=shared), ring, times)
    again = Cluster("c", nodes, 8, Device(100, 80), found, found)
    for nbytes, seconds in times:
        assert ring.turn(nbytes, again).alone_s == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("slowest", [[3.0, 1.0, 5.0], [2.0, 2.0, 9.0, 1.0, 0.5]])
def test_a_time_is_the_median_of_the_slowest_ranks_without_the_first_call(monkeypatch, slowest):
    clock, calls = [0.0], []
    of_others = iter(slowest)

    def take(value: torch.Tensor, _: object) -> None:
        value.fill_(max(float(value), next(of_others)))  # another rank is the slowest

    def run() -> None:
        calls.append(clock[0])
        clock[0] += 100.0 if len(calls) == 1 else 0.25

    others = SimpleNamespace(barrier=lambda: None, all_reduce=take, ReduceOp=dist.ReduceOp)
    monkeypatch.setattr(calibration, "dist", others)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    seconds = calibration._Clock(torch.device("cpu"), len(slowest)).seconds(run)
    assert seconds == sorted(slowest)[len(slowest) // 2] and len(calls) == len(slowest) + 1


def _calibrated() -> str:
    cluster = Cluster("here", 2, 2, Device(0.1, 8), Link(1.0), Link(1.0, cards=1), runs_ahead=False)
    text = cluster_toml(calibrate(cluster, (2**10, 2**18, 2**20), repetitions=1))
    dist.barrier()
    return text


@pytest.mark.slow
def test_a_calibration_of_four_ranks_is_a_cluster_file():
    texts = run_ranks(_calibrated, 4)
    cluster = read_cluster(tomllib.loads(texts[0]), "here")
    assert cluster.inside.gb_s > 0 and cluster.between.gb_s > 0 and cluster.device.efficiency > 0
