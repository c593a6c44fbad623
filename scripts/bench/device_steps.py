# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank of bench_device measures."""

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.contenders.systems import SYSTEMS, BesideTensorParallel, MegatronFSDP2
from scripts.testbed.profile import NetworkProfile

FLOOR = "compute only"
BESIDE_TP = "main-thread, TP in a node"
MEGATRON_FSDP_2 = "Megatron-FSDP v2, HSDP"
CONTENDERS = SYSTEMS | {BESIDE_TP: BesideTensorParallel, MEGATRON_FSDP_2: MegatronFSDP2}
STEPS = 3  # the last one is measured: ours knows from the first what follows what


def measure(
    shape: tuple[int, int], size: ModelSize, network: NetworkProfile, contenders: Sequence[str]
) -> dict[tuple[str, bool], dict]:
    """By contender, and by whether the host waits for each step."""
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("inter", "intra"))
    floor_ms = _measured(FLOOR, size, mesh, network, False)["step_ms"]
    return {
        (name, synchronizes): _measured(name, size, mesh, network, synchronizes)
        | {"floor_ms": floor_ms}
        for name, synchronizes in product(contenders, (False, True))
    }


def _measured(
    name: str, size: ModelSize, mesh: DeviceMesh, network: NetworkProfile, synchronizes: bool
) -> dict:
    from scripts.testbed.device import inside

    inside.state_time(network)
    system = CONTENDERS[name](size, mesh)
    ends, losses = [], []
    for _ in range(STEPS):
        loss = system.step_on_device()
        dist.all_reduce(loss)  # as Megatron does for its log
        losses.append(loss)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if synchronizes:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    step_ms = torch.tensor(ends[-2].elapsed_time(ends[-1]), device="cuda")
    means = [round(loss.item() / dist.get_world_size(), 6) for loss in losses]
    system.drain()
    dist.all_reduce(step_ms, dist.ReduceOp.MAX)
    system.close()
    return {"step_ms": round(step_ms.item(), 3), "losses": means}
