# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the default schedule of a device hides where communication takes about as long as
computation, by the emulated device's own clock, which is the same in every run."""

import pytest

from scripts.bench.bench_device import Cluster
from scripts.bench.device_steps import measure
from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.device.worlds import DeviceWorlds
from tests.support.selection import slow_unless

SIZE = ModelSize(hidden=32, blocks=6, rows=2, block_ms=10.0, micro_batches=4)
MOST = 1.10


@pytest.mark.parametrize(
    ("nodes", "ranks", "queues"),
    [slow_unless(True, 2, 2, "1"), slow_unless(False, 1, 4, "1"), slow_unless(False, 2, 2, "32")],
)
def test_a_step_of_the_default_schedule_takes_at_most_a_tenth_longer_than_its_computation(
    worlds: DeviceWorlds, nodes: int, ranks: int, queues: str
):
    """With NCCL's implicit order, which we ship; a host that waits for each step included."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    cluster = Cluster(nodes, ranks)
    given = (nodes, ranks), SIZE, cluster.network(SIZE, 0.8), ["main-thread"]
    for seen in worlds.run(measure, nodes * ranks, *given, env=env)[0].values():
        assert seen["floor_ms"] == pytest.approx(6 * 4 * 3 * 10, abs=0.1)
        assert seen["step_ms"] <= MOST * seen["floor_ms"]
