# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Threads that sleep at random, whatever memory, depth, chunks, micro-batches and budgets: the same
bits, one order on all ranks, and no place is lost.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.drivers import ThreadDriver, start_driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import Timeline
from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.step import KeepBudgets
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, on_submit
from tests.support.toy_models import toy_batch, toy_loss

STEPS, MOST_SLEEP_S, MOST_AHEAD = 3, 0.002, 3
SIZES = [(2, 2, 4), (4, 1, 4), (1, 4, 4), (4, 2, 4), (2, 4, 4), (4, 4, 4)]
MODELS = [{}, {"is_tied": True}, {"recompute": True}]
BUDGETS = (0, 2**12, 2**13, 2**16)  # a block has 6.6 kB in fp32

Turn = tuple[str, int]  # "F" or "B", and the chunk


@dataclass(frozen=True)
class Program:
    """What one run does; everything but the sleeps follows from it. turns: of each step."""

    sizes: tuple[int, int, int]
    model: int
    dtype: torch.dtype
    num_chunks: int
    turns: tuple[tuple[Turn, ...], ...]
    memory: float


@dataclass
class Outcome:
    """losses: of each step; grads: complete gradients of the second step, the first with a record
    of the order to keep anything by; found: uses that found what they need kept."""

    losses: list[float] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    submitted: list[tuple[str, str]] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)


def draw_turns(dice: random.Random, num_chunks: int, micro_batches: int) -> tuple[Turn, ...]:
    """As a pipeline stage has them: each chunk's backwards in the order of its forwards, of which
    some run ahead."""
    left, ahead = [micro_batches] * num_chunks, [0] * num_chunks
    turns: list[Turn] = []
    while any(left) or any(ahead):
        legal = [("F", chunk) for chunk, n in enumerate(left) if n and ahead[chunk] < MOST_AHEAD]
        phase, chunk = dice.choice(legal + [("B", chunk) for chunk, n in enumerate(ahead) if n])
        left[chunk] -= phase == "F"
        ahead[chunk] += 1 if phase == "F" else -1
        turns.append((phase, chunk))
    return tuple(turns)


def draw_program(dice: random.Random) -> Program:
    num_chunks = dice.randint(1, 2)
    usual, other = (draw_turns(dice, num_chunks, dice.randint(1, 3)) for _ in range(2))
    return Program(
        dice.choice(SIZES),
        dice.randrange(len(MODELS)),
        dice.choice([torch.float32, torch.bfloat16]),
        num_chunks,
        # Most steps are like the one before; others depart from it somewhere.
        tuple(other if dice.random() < 0.2 else usual for _ in range(STEPS)),
        dice.choice((0.0, 0.2, 0.6, 1.0)),
    )


def draw_schedule(dice: random.Random) -> ScheduleConfig:
    return ScheduleConfig(
        "threaded",
        prefetch_depth=dice.randint(1, 4),
        grad_slot_nbytes=dice.choice((1024, 8192, 2**20)),
        keep_params_nbytes=dice.choice(BUDGETS),
        keep_grads_nbytes=dice.choice(BUDGETS),
    )


class SleepyDriver(ThreadDriver):
    """Its threads pause as `sleeps` decides, as do the modules that are given to it."""

    def __init__(self, sleeps: random.Random):
        self._pause = lambda: sleeps.choice([0.0, 0.0, sleeps.uniform(0.0, MOST_SLEEP_S)])
        super().__init__(Timeline(CpuDevice()), 60.0)

    def run(self, task: Task) -> None:
        time.sleep(self._pause())
        super().run(task)

    def slow_down(self, module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda *_: time.sleep(self._pause()))
        module.register_full_backward_hook(lambda *_: time.sleep(self._pause()))


def train(program: Program, schedule: ScheduleConfig, sleeps: random.Random | None) -> Outcome:
    """sleeps: None for the inline schedule, with as much memory as it needs."""
    outcome = Outcome()
    if sleeps is None:
        driver, memory = start_driver(schedule, CpuDevice()), 1.0
    else:
        driver, memory = SleepyDriver(sleeps), program.memory
    on_submit(driver, lambda task: outcome.submitted.append((task.lane, task.unit)))
    budgets = KeepBudgets.of(schedule, driver)
    depth = 4 // program.num_chunks
    trainers: list[EngineTrainer] = []
    for _ in range(program.num_chunks):
        model = build_toy(program.dtype, depth=depth, **MODELS[program.model])
        if isinstance(driver, SleepyDriver):
            for block in model.blocks:
                driver.slow_down(block)
        options: Any = {
            "schedule": schedule,
            "driver": driver,
            "memory": memory,
            "budgets": budgets,
        }
        trainers.append(EngineTrainer(model, program.sizes, **options))
    for step, turns in enumerate(program.turns):
        outcome.losses.append(run_step(trainers, turns, step))
        note_kept(budgets, outcome)
        if step == 1:
            outcome.grads = [
                unit.main_grad.view(unit.optim_range).clone()
                for trainer in trainers
                for unit in trainer.runtime.units
            ]
        for trainer in trainers:
            trainer.update()
    for trainer in trainers:  # all, before one uses the communicators of all
        trainer.runtime.settle()
    for trainer in trainers:
        outcome.params += trainer.full_params().values()
        # No view outlived its unit. Weights of several modules may need more than memory for one
        # layer; a step that departs from the one before says so.
        warned = trainer.runtime.gathers.warned
        assert warned <= {"growth", "departure"}, warned
    for trainer in trainers:
        trainer.runtime.close()
        assert trainer.runtime.num_places_in_use() == 0
    driver.close()
    return outcome


def note_kept(budgets: KeepBudgets, outcome: Outcome) -> None:
    """Of the step before, whose budgets held."""
    params = None if budgets.params is None else budgets.params.residency
    for what, residency in (("params", params), ("grads", budgets.grads)):
        if residency is not None:
            assert residency.planned_nbytes <= residency.budget
            outcome.found[what] += residency.num_hits


def run_step(trainers: Sequence[EngineTrainer], turns: Sequence[Turn], step: int) -> float:
    """Forward and backward of all micro-batches, up to complete gradients; the mean loss."""
    num_turns = Counter(turns)
    for trainer in trainers:
        trainer.runtime.zero_grads()
    not_last = [trainer.runtime.no_sync() for trainer in trainers]
    for context in not_last:
        context.__enter__()
    losses: list[deque[torch.Tensor]] = [deque() for _ in trainers]
    done, total = Counter[Turn](), torch.zeros(())
    for phase, chunk in turns:
        done[phase, chunk] += 1
        if phase == "F":
            tokens = toy_batch(step, done["F", chunk], dist.get_rank())
            losses[chunk].append(toy_loss(trainers[chunk].model, tokens) / num_turns["F", chunk])
            total += losses[chunk][-1].detach()
            continue
        if done["B", chunk] == num_turns["B", chunk]:
            not_last[chunk].__exit__(None, None, None)
        losses[chunk].popleft().backward()
    for trainer in trainers:
        trainer.runtime.sync_grads()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def are_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def are_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """But for the order in which fp32 numbers are added."""
    return all(
        torch.allclose(mine, other, rtol=0, atol=2e-6 * float(other.abs().amax()) + 1e-9)
        for mine, other in zip(ours, theirs, strict=True)
        if mine.numel()
    )


def run_many(num_runs: int, seed: int) -> Counter[str]:
    """What was found kept in all of them."""
    found = Counter[str]()
    for run in range(num_runs):
        dice = random.Random(f"{seed} {run}")  # the same program on every rank
        program, schedule = draw_program(dice), draw_schedule(dice)
        # The sleeps differ between ranks: nothing may depend on who is late.
        ours = train(program, schedule, random.Random())
        found += ours.found
        inline = train(program, replace(schedule, kind="inline"), None)
        assert ours.losses == inline.losses, (program, schedule)
        assert are_equal(ours.grads, inline.grads), (program, schedule)
        assert are_equal(ours.params, inline.params), (program, schedule)
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, ours.submitted)
        assert all(order == ours.submitted for order in orders), (program, schedule)
        if not (schedule.keep_params_nbytes or schedule.keep_grads_nbytes):
            continue
        plain = train(program, ScheduleConfig("inline"), None)
        assert ours.losses[:2] == plain.losses[:2], (program, schedule)
        if schedule.keep_grads_nbytes:
            assert are_close(ours.grads, plain.grads), (program, schedule)
        else:
            assert are_equal(ours.params, plain.params), (program, schedule)
    return found


def test_2_random_schedules_and_budgets_give_the_bits_of_the_inline_schedule_and_lose_no_place():
    for found in run_ranks(run_many, 4, 2, 7):
        assert found["params"] > 0 and found["grads"] > 0, found


@pytest.mark.slow
def test_200_random_schedules_and_budgets_give_the_bits_of_the_inline_schedule_and_lose_no_place():
    for found in run_ranks(run_many, 4, 200, 2, timeout_s=1500):
        assert found["params"] > 1000 and found["grads"] > 300, found
