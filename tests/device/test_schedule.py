# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the default schedule of a device hides where communication takes about as long as
computation, by the emulated device's own clock, which is the same in every run."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scripts.bench.bench_device import Cluster
from scripts.bench.device_steps import measure
from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.contenders.systems import SYSTEMS
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.profile import NetworkProfile
from tests.support.selection import slow_unless

SIZE = ModelSize(hidden=32, blocks=6, rows=2, block_ms=10.0, micro_batches=4)
MOST = 1.10


@pytest.mark.parametrize(
    ("nodes", "ranks", "queues"),
    [(1, 2, "1"), *(slow_unless(False, *one) for one in ((2, 2, "1"), (1, 4, "1"), (2, 2, "32")))],
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


def added_and_exposed(
    shape: tuple[int, int], network: NetworkProfile, synchronizes: bool
) -> tuple[float, float]:
    """Milliseconds that a step takes more than its computation, and those that the engine's report
    calls exposed."""
    from scripts.testbed.device import inside

    class Timed(SYSTEMS["main-thread"]):
        timed_every = 1

    inside.state_time(network)
    system = Timed(SIZE, init_device_mesh("cuda", shape, mesh_dim_names=("inter", "intra")))
    ends, exposed_s = [], 0.0
    for _ in range(3):
        dist.all_reduce(system.step_on_device())  # as Megatron does for its log
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if synchronizes or len(ends) == 2:
            torch.cuda.synchronize()
        exposed_s = system.runtime.driver.timeline.pop_times().exposed_s
    torch.cuda.synchronize()
    exposed_s += system.runtime.driver.timeline.pop_times().exposed_s
    system.drain()
    system.close()
    floor_ms = 3 * SIZE.blocks * SIZE.micro_batches * SIZE.block_ms
    return ends[-2].elapsed_time(ends[-1]) - floor_ms, 1e3 * exposed_s


@pytest.mark.parametrize("synchronizes", [slow_unless(False, False), slow_unless(True, True)])
@pytest.mark.parametrize(
    ("nodes", "ranks", "queues"),
    [slow_unless(False, 2, 2, "1"), slow_unless(True, 1, 2, "1"), slow_unless(False, 1, 4, "1")],
)
def test_exposed_communication_is_what_a_step_takes_more_than_its_computation(
    worlds: DeviceWorlds, nodes: int, ranks: int, queues: str, synchronizes: bool
):
    """Also where the implicit order or the host that waits hides it from every wait. With one queue
    a kernel behind a collective that has not begun is held up unseen: a seventh of it all."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    given = (nodes, ranks), Cluster(nodes, ranks).network(SIZE, 0.8), synchronizes
    for added_ms, exposed_ms in worlds.run(added_and_exposed, nodes * ranks, *given, env=env):
        assert 0.8 * added_ms <= exposed_ms <= 1.02 * added_ms
