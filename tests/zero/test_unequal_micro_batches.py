# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of micro-batches train as one process does: groups that neither
gather nor reduce together take as many as they have, and a rank that has fewer than its group takes
empty ones.
"""

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from megatron_asynchzp.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.toy_models import toy_batch

CLIP, STEPS_OF_A_ROUND = 0.3, 4
Sizes = tuple[int, int, int]


def counts_of(sizes: Sizes, num_ranks: int, chance: random.Random) -> list[tuple[int, int]]:
    """Of each rank: how many micro-batches its group takes, and how many of them are not empty."""
    in_step = max(sizes[:2])
    counts: list[tuple[int, int]] = []
    for _ in range(num_ranks // in_step):
        most = chance.randint(1, 8)
        full = [chance.choice([most, most, chance.randint(0, most)]) for _ in range(in_step)]
        counts += [(most, one) for one in full]
    return counts


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens: 0 of no sequence."""
    logits = model(tokens[:, :-1]).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")


def new_sgd(params) -> torch.optim.Optimizer:
    # Adam would enlarge the last digits of gradients that are nearly zero.
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def sharded_step(
    sharded: ShardedModel, counts: Sequence[tuple[int, int]], step: int
) -> tuple[float, float]:
    """Loss and gradient norm of the step over all ranks."""
    rank, total = dist.get_rank(), sum(full for _, full in counts) or 1
    most, full = counts[rank]
    sharded.zero_grad()
    seen = torch.zeros(())
    for index in range(most):
        sharded.set_is_last_micro_batch(index == most - 1)
        tokens = toy_batch(step, index, rank)
        loss = loss_of(sharded.model, tokens if index < full else tokens[:0]) / total
        (loss * len(counts)).backward()
        seen += loss.detach()
    norm = sharded.clip_grad_norm_(CLIP).item()
    sharded.step()
    dist.all_reduce(seen)
    return seen.item(), norm


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Sequence[tuple[int, int]], step: int
) -> tuple[float, float]:
    total = sum(full for _, full in counts) or 1
    optimizer.zero_grad(set_to_none=False)
    seen = 0.0
    for rank, (_, full) in enumerate(counts):
        for index in range(full):
            loss = loss_of(model, toy_batch(step, index, rank)) / total
            loss.backward()
            seen += loss.item()
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    optimizer.step()
    return seen, norm


def compare(sizes: Sizes, schedule: str, num_rounds: int, seed: int) -> int:
    """Rounds of a few steps, each from the same weights. Returns how many steps there were with
    groups of different counts."""
    num_ranks, chance = dist.get_world_size(), random.Random(seed)
    model = build_toy()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    config = ScheduleConfig(schedule, early_update="on" if seed % 2 else "auto")
    sharded = shard(model, model.blocks, ShardSizes(*sizes), new_sgd, schedule=config)
    num_unequal = 0
    for number in range(num_rounds):
        plain = build_toy()
        plain_optimizer = new_sgd(plain.parameters())
        if number:
            sharded.load_full_params(start)
            sharded.optimizer.state.clear()
        for step in range(STEPS_OF_A_ROUND):
            counts = counts_of(sizes, num_ranks, chance)
            num_unequal += len({most for most, _ in counts}) > 1
            found = sharded_step(sharded, counts, step)
            expected = plain_step(plain, plain_optimizer, counts, step)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-7), (counts, step)
        weights = plain.state_dict()
        for name, value in sharded.full_params():
            assert torch.allclose(value, weights[name], rtol=0, atol=1e-6), name
    sharded.close()
    return num_unequal


def test_groups_with_different_numbers_of_micro_batches_train_as_one_process():
    assert all(run_ranks(compare, 4, (1, 2, 4), "threaded", 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["threaded", "main-thread", "inline"])
@pytest.mark.parametrize(
    "sizes", [(2, 2, 4), (1, 2, 4), (2, 1, 2), (1, 1, 4), (1, 1, 1), (1, 1, 2), (4, 4, 4)]
)
def test_so_do_40_random_assignments_on_4_ranks(sizes, schedule):
    num_unequal = run_ranks(compare, 4, sizes, schedule, 10, 3, timeout_s=500.0)
    assert all(num_unequal) or max(sizes[:2]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4, 8), (1, 1, 8), (4, 2, 8), (2, 2, 2)])
def test_so_do_40_random_assignments_on_8_ranks(sizes):
    assert all(run_ranks(compare, 8, sizes, "threaded", 10, 5, timeout_s=500.0))
