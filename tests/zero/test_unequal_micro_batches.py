# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of micro-batches train as one process does: groups that neither
gather nor reduce together take as many as they have, none included, and a rank that has fewer than
its group takes empty ones.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.ranks import observe_ranks, run_ranks
from tests.support.engine import EngineTrainer, build_toy
from tests.support.toy_models import ToyLM, toy_batch

CLIP, STEPS_OF_A_ROUND = 0.3, 4
Sizes = tuple[int, int, int]


class OutOfOrder(ToyLM):
    """Neither its forward nor its backward goes in the order of its units, which are more than are
    rebuilt ahead of their use."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in (1, 2, 4, 3, 0):
            x = self.blocks[index](x)
        return self.output(self.norm(x), None)


def new_model() -> ToyLM:
    torch.manual_seed(5)
    return OutOfOrder(depth=5)


def counts_of(
    sizes: Sizes, num_ranks: int, chance: random.Random, least: int = 1
) -> list[tuple[int, int]]:
    """Of each rank: how many micro-batches its group takes, and how many of them are not empty.
    least: of a group; 0 for often none."""
    in_step = max(sizes[:2])
    counts: list[tuple[int, int]] = []
    for _ in range(num_ranks // in_step):
        most = chance.choice([0, chance.randint(1, 8)]) if least == 0 else chance.randint(1, 8)
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
    optimizer.zero_grad()  # where nobody has a micro-batch nothing is updated, momentum or not
    seen = 0.0
    for rank, (_, full) in enumerate(counts):
        for index in range(full):
            loss = loss_of(model, toy_batch(step, index, rank)) / total
            loss.backward()
            seen += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    optimizer.step()
    return seen, norm


def compare(
    sizes: Sizes,
    schedule: str,
    num_rounds: int,
    seed: int,
    least: int = 1,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Rounds of a few steps, each from the same weights. Returns how many steps there were with
    groups of different counts; where `least` is 0, with groups that had none beside others.

    least: as in counts_of, from the second step on; more: of the ScheduleConfig.
    """
    num_ranks, chance = dist.get_world_size(), random.Random(seed)
    model = new_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    early_update = "on" if seed % 2 else "auto"
    config = ScheduleConfig(schedule, **{"early_update": early_update, **(more or {})})
    sharded = shard(model, model.blocks, ShardSizes(*sizes), new_sgd, schedule=config)
    num_unequal = 0
    for number in range(num_rounds):
        plain = new_model()
        plain_optimizer = new_sgd(plain.parameters())
        if number:
            sharded.load_full_params(start)
            sharded.optimizer.state.clear()
        for step in range(STEPS_OF_A_ROUND):
            counts = counts_of(sizes, num_ranks, chance, least if number or step else 1)
            all_most = {most for most, _ in counts}
            num_unequal += len(all_most) > 1 and (least > 0 or 0 in all_most)
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


# ---- groups without any micro-batch

SOON_S = 40.0  # far more than it takes on a busy machine, far less than a collective may take


def test_a_group_without_a_micro_batch_does_what_the_others_do():
    limit = {"time_limit_s": 60.0}
    assert all(run_ranks(compare, 4, (1, 2, 4), "threaded", 1, 31, 0, limit))


def start_without(rank: int, sizes: Sizes, goes_on: bool) -> tuple[str, float]:
    """The first step, in which `rank` alone has no micro-batch. Returns what it ended with, and
    seconds. goes_on: with an empty one, after the refusal."""
    sharded = shard(model := new_model(), model.blocks, ShardSizes(*sizes), new_sgd)
    counts = [(int(one != rank), int(one != rank)) for one in range(dist.get_world_size())]
    start_s, message = time.monotonic(), ""
    try:
        sharded_step(sharded, counts, 0)
    except ConfigurationError as error:
        message = str(error)
        if goes_on:
            counts[rank] = (1, 0)
            sharded_step(sharded, counts, 0)
    except CollectiveFailure as failure:
        message = str(failure)
    took_s = time.monotonic() - start_s
    if goes_on:
        plain = new_model()
        plain_step(plain, new_sgd(plain.parameters()), counts, 0)
        weights = plain.state_dict()
        for name, value in sharded.full_params():
            assert torch.allclose(value, weights[name], rtol=0, atol=1e-6), name
        sharded.close()
    return message, took_s


@pytest.mark.slow
def test_in_its_first_step_a_group_without_one_is_told_in_one_line_and_can_go_on():
    for sizes in ((1, 1, 2), (1, 1, 1)):
        messages = [message for message, _ in run_ranks(start_without, 2, 1, sizes, True)]
        assert messages[0] == "" and "give it an empty one, as model(tokens[:0])" in messages[1]
        assert "\n" not in messages[1], sizes


@pytest.mark.slow
def test_if_it_ends_there_the_others_are_told_soon():
    ended = observe_ranks(start_without, 4, 3, (1, 1, 4), False, num_survivors=4)
    assert "has had no micro-batch yet" in ended.pop(3)[0]
    for message, took_s in ended.values():
        assert "no answer from rank 3" in message and "\n" not in message
        assert took_s < SOON_S


def follow_twice() -> tuple[int, int]:
    """Reductions of gradients after the first and the second end of a step."""
    trainer = EngineTrainer(build_toy(), (1, 1, 2))
    trainer.local_step(0, 1)
    runtime = trainer.runtime
    runtime.zero_grads()
    if dist.get_rank() == 1:
        trainer.backward(1, 1, begins=False)
    runtime.sync_grads()
    once = runtime.driver.counts["grad-sync"]
    runtime.sync_grads()
    twice = runtime.driver.counts["grad-sync"]
    runtime.close()
    return once, twice


def test_a_rank_without_a_micro_batch_follows_the_others_once_in_a_step():
    for once, twice in run_ranks(follow_twice, 2):
        assert once == twice
