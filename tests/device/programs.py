# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks train in these tests: the same program on gloo and the CPU, and on NCCL or HCCL
and the emulated device. Each returns what it has seen as numbers that compare bit for bit."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from scripts.testbed.device.delays import Delays
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

CLIP = 0.3
STEPS = 3

Seen = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


class Case(NamedTuple):
    sizes: tuple[int, int, int]
    schedule: str = "main-thread"
    num_micro_batches: int = 2
    recomputes: bool = False
    num_idle: int = 0  # the first so many ranks have no micro-batch in the second step


def is_emulated() -> bool:
    return dist.get_backend() in ("nccl", "hccl")


def device_of_rank() -> torch.device:
    if not is_emulated():
        return torch.device("cpu")
    return torch.device("cuda" if dist.get_backend() == "nccl" else "npu", dist.get_rank())


def new_toy(recomputes: bool = False) -> ToyLM:
    torch.manual_seed(0)
    return ToyLM(depth=3, recompute=recomputes).to(device_of_rank())


def new_adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)  # pyright: ignore[reportArgumentType]


def steps_of(
    model: nn.Module,
    num_micro_batches: int,
    begin: Callable[[], object],
    mark: Callable[[bool], object],
    end: Callable[[], torch.Tensor],
    num_idle: int = 0,
) -> Seen:
    """A plain training loop, in which the host waits for nothing before the end.

    end: clips, updates and returns the norm; num_idle: as in Case.
    """
    rank, device, seen = dist.get_rank(), device_of_rank(), []
    for step in range(STEPS):
        begin()
        total = torch.zeros((), device=device)
        for index in range(0 if step == 1 and rank < num_idle else num_micro_batches):
            mark(index == num_micro_batches - 1)
            batch = toy_batch(step, index, rank).to(device)
            loss = toy_loss(model, batch) / num_micro_batches
            loss.backward()
            total += loss.detach()
        norm = end()
        dist.all_reduce(total)
        seen.append((total, norm))
    return [(total.item(), norm.item()) for total, norm in seen]


# ---- the engine


def train_engine(case: Case) -> Seen:
    model = new_toy(case.recomputes)
    schedule = ScheduleConfig(case.schedule)
    with shard(
        model, model.blocks, ShardSizes(*case.sizes), new_adamw, schedule=schedule
    ) as sharded:
        return steps_of(
            model,
            case.num_micro_batches,
            sharded.zero_grad,
            sharded.set_is_last_micro_batch,
            lambda: _clip_and_step(sharded),
            case.num_idle,
        )


def _clip_and_step(sharded: ShardedModel) -> torch.Tensor:
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    return norm


def train_engine_each(cases: Sequence[Case]) -> list[Seen]:
    return [train_engine(case) for case in cases]


class Under(NamedTuple):
    """What a case has seen under delays, and the emulated device beside it."""

    case: Case
    delays: Delays
    seen: Seen
    digest: int
    waited: dict[str, int]  # operations that waited for their stream, so far


def train_engine_under(cases: Sequence[Case], laws: Sequence[Delays]) -> list[Under]:
    """Every case under every law, in one world."""
    from scripts.testbed.device import inside

    results = []
    for delays in laws:
        for case in cases:
            inside.set_delays(delays, dist.get_rank(), dist.get_world_size())
            seen = train_engine(case)
            results.append(Under(case, delays, seen, inside.ran().digest, inside.waited()))
    return results
