# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the steps whose commands are recorded on the emulated device: of Megatron with every kind of
parallelism that communicates itself, and of the library.
"""

from typing import Any, NamedTuple

from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, TENSOR_PARALLEL, size_flags
from scripts.testbed.megatron_runs import gpt_args, listening, on_device, run_pretrain

NUM_WARM = 4  # steps in which the engine still learns the order of use
NUM_RECORDED = 2  # param-syncs of a step end in the next one


class Layout(NamedTuple):
    """flags: of Megatron, or none for the library; sizes: of ours;
    demands_one_queue: whether Megatron does, with CUDA_DEVICE_MAX_CONNECTIONS=1; ranks: of the
    world."""

    flags: tuple[str, ...]
    sizes: tuple[Any, ...]
    demands_one_queue: bool = False
    ranks: int = 4


# fmt: off
LAYOUTS = {
    "tensor": Layout(tuple(TENSOR_PARALLEL), (2, 2, 2), demands_one_queue=True),
    "pipeline": Layout((
        "--num-layers", "4", "--pipeline-model-parallel-size", "2",
        "--num-layers-per-virtual-pipeline-stage", "1"), (2, 2, 2)),
    "context": Layout(("--context-parallel-size", "2", "--use-pasa-attention"),
                      (2, 2, 4), demands_one_queue=True),
    "expert": Layout((*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"),
                     (2, 2, 4)),
    "library": Layout((), (2, 2, 4)),
    "cut": Layout((), (4, 4, 4, (2,))),
    "cut-twice": Layout((), (8, 8, 8, (2, 4)), ranks=8),
}
# fmt: on


def recorded(worlds: DeviceWorlds, layout: Layout) -> list[list[str]]:
    """Of each rank the lines of its commands in NUM_RECORDED steps, which begin on idle devices."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if layout.demands_one_queue else {}
    if not layout.flags:
        return worlds.run(_record_library, layout.ranks, layout.sizes, env=env)
    line = gpt_args(*layout.flags, *size_flags(layout.sizes), "--clip-grad", "1e6")
    return worlds.run(_record_megatron, layout.ranks, line, env=env, timeout_s=280)


def _record_megatron(line: list[str]) -> list[str]:
    from scripts.testbed.device import inside

    num_steps, lines = 0, list[str]()

    def begin_step() -> None:
        nonlocal num_steps
        if num_steps == NUM_WARM:
            inside.record_commands()
        if num_steps == NUM_WARM + NUM_RECORDED:
            lines.extend(inside.recorded_commands())
        num_steps += 1

    num_iterations = NUM_WARM + NUM_RECORDED + 1
    with on_device(), listening(begin_step, lambda _: None):
        run_pretrain([*line, "--train-iters", str(num_iterations)])
    return lines


def _record_library(sizes: tuple[Any, ...]) -> list[str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_asynchzp.sharding.topology import ShardSizes
    from scripts.testbed.contenders.delayed_model import ModelSize
    from scripts.testbed.contenders.systems import SYSTEMS, new_runtime
    from scripts.testbed.device import inside

    model = ModelSize(hidden=32, blocks=4, rows=2, block_ms=0.0, micro_batches=2)
    in_node, _, world_size = sizes[:3]
    mesh = init_device_mesh("cuda", (world_size // in_node, in_node))

    class OfSizes(SYSTEMS["main-thread"]):
        def new_runtime(self, units: list[Any], schedule: Any) -> Any:
            return new_runtime(self.model, units, ShardSizes(*sizes), None, schedule)

    system = OfSizes(model, mesh)
    for step in range(NUM_WARM + NUM_RECORDED):
        if step == NUM_WARM:
            inside.record_commands()
        loss = system.step_on_device()
        dist.all_reduce(loss)  # as Megatron does for its log
    lines = inside.recorded_commands()
    system.drain()
    system.close()
    return lines
