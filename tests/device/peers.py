# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of others beside the engine's, on the toy of these tests and the same batches,
without clipping. Megatron-FSDP needs CUDA."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from scripts.testbed.device.delays import Delays
from tests.device.programs import is_emulated, new_adamw, new_toy, steps_of
from tests.support.toy_models import Block

MICRO_BATCHES = 2
Losses = list[float]


def new_sgd(params: Any) -> torch.optim.Optimizer:
    """A step with gradients of zero changes nothing."""
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


NEW_OPTIMIZER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": new_sgd,
    "adamw": new_adamw,
}


def _losses(
    model: nn.Module, optimizer: Any, mark: Callable[[bool], object] = lambda is_last: None
) -> Losses:
    """Of each step."""
    no_norm = torch.zeros(())

    def end() -> torch.Tensor:
        optimizer.step()
        return no_norm

    return [loss for loss, _ in steps_of(model, MICRO_BATCHES, optimizer.zero_grad, mark, end)]


def ddp(optimizer: str = "sgd") -> Losses:
    model = nn.parallel.DistributedDataParallel(new_toy())
    return _losses(model, NEW_OPTIMIZER[optimizer](model.parameters()))


def engine(optimizer: str = "sgd") -> Losses:
    model, new = new_toy(), NEW_OPTIMIZER[optimizer]
    with shard(model, model.blocks, ShardSizes(1, 2, 2), new) as sharded:
        return _losses(model, sharded, sharded.set_is_last_micro_batch)


def megatron_fsdp(strategy: int, optimizer: str = "sgd", marks_last: bool = True) -> Losses:
    """v1. strategy: 0 as DDP, 1 shards optimizer states, 2 gradients too, 3 parameters too;
    marks_last: whether it knows which micro-batch is the last."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        fully_shard_model,
        fully_shard_optimizer,
    )

    model: Any = fully_shard_model(new_toy(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    sharded = fully_shard_optimizer(NEW_OPTIMIZER[optimizer](model.parameters()))
    return _losses(model, sharded, *([model.set_model_auto_sync] if marks_last else []))


def megatron_fsdp_v2(optimizer: str = "sgd") -> Losses:
    """v2, `experimental` in the wheel: all ranks share all three states."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
        Flat,
        Placements,
        fully_shard,
        fully_shard_optimizer,
    )

    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    placements = Placements([0], [Flat()], [Flat()], [Flat()])
    model = new_toy()
    for block in model.blocks:
        fully_shard(block, mesh, placements)
    fully_shard(model, mesh, placements)
    updates = NEW_OPTIMIZER[optimizer](model.parameters())
    fully_shard_optimizer(updates)
    return _losses(model, updates)


def megatron_fsdp_v2_hybrid(optimizer: str = "sgd") -> Losses:
    """v2, HSDP on nodes of two ranks. Gradients add up over them after the last micro-batch."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
        Flat,
        Placements,
        fully_shard,
        fully_shard_optimizer,
        microbatch,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.placement import (
        Partial,
        Replicate,
    )

    mesh = dist.init_device_mesh("cuda", (dist.get_world_size() // 2, 2))
    states = [Replicate(), Flat()]
    placements = Placements([0, 1], states, [Partial(dist.ReduceOp.AVG), Flat()], states)
    model = new_toy()
    for block in model.blocks:
        fully_shard(block, mesh, placements)
    fully_shard(model, mesh, placements)
    updates = NEW_OPTIMIZER[optimizer](model.parameters())
    fully_shard_optimizer(updates)
    with ExitStack() as within:

        def mark(is_last: bool) -> None:
            within.close()
            within.enter_context(microbatch(model, is_last))

        return _losses(model, updates, mark)


Run = tuple[Callable[..., Losses], tuple[Any, ...]]
"""A function of this file, and its arguments."""


def train_each(runs: Iterable[Run], laws: Iterable[Delays] = (Delays(),)) -> list[list[Losses]]:
    """Of each law what each run has seen."""
    results = []
    for delays in laws:
        if is_emulated():
            from scripts.testbed.device import inside

            inside.set_delays(delays, dist.get_rank(), dist.get_world_size())
        results.append([run(*args) for run, args in runs])
    return results


def unordered(run: Callable[..., Losses], *args: Any) -> list[str]:
    """What the watch tells of a run."""
    from scripts.testbed.device import inside

    return inside.unordered(lambda: run(*args))
