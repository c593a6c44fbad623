# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner counts against what the engine issues: the same collectives, on 100 random
programs, with random sizes, schedules, pipelines and units."""

import random
from collections import Counter
from unittest import mock

import pytest
import torch

from megatron_asynchzp.planner.cluster import Ring
from megatron_asynchzp.planner.order import (
    COMPUTE,
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    OrderUnit,
    Phase,
    Schedule,
    StepOrder,
    Visit,
)
from megatron_asynchzp.planner.traffic import ALL_REDUCE, Collective, Group, step_traffic
from megatron_asynchzp.sharding.layout import PARAM_ALIGNMENT_NUMEL, round_up
from megatron_asynchzp.sharding.topology import ShardSizes
from megatron_asynchzp.testbed.fabric.reduction import Reduction
from megatron_asynchzp.testbed.fabric.rings import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from megatron_asynchzp.zero.config import ScheduleConfig
from tests.support.scheduler_program import WORLD_SIZE, Program, Step, UnitShape, execute

NESTED = [
    (param, grad, optim)
    for optim in (1, 2, 4, 8)
    for param in (1, 2, 4, 8)
    for grad in (1, 2, 4, 8)
    if param <= optim and grad <= optim
]
LANES = {"gather": GATHER, "reduce": REDUCE, "grad-sync": GRAD_SYNC, "param-sync": PARAM_SYNC}


def random_program(seed: int) -> Program:
    """Three equal steps, of which the last is in the steady state."""
    chance = random.Random(seed)
    numels = [chance.choice((24, 300, 2000)) for _ in range(chance.randint(1, 7))]
    micro_batches = chance.randint(1, 4)
    step = Step(
        micro_batches=micro_batches,
        warm_up=chance.choice((0, 0, 1, 2, 3)),
        recomputes=chance.random() < 0.3,
        root=chance.choice((None, 0)) if len(numels) > 1 else None,
    )
    units = tuple(UnitShape(numel, chance.random() > 0.1) for numel in numels)
    config = ScheduleConfig(
        "main-thread",
        prefetch_depth=chance.randint(0, 3),
        param_slots=chance.choice((0, 0, 1, 2, 5)),
        grad_slots=chance.randint(1, 3),
        checks_order=False,
    )
    return Program(units, (step,) * 3, config, chance.choice(NESTED), dtype=torch.bfloat16)


def padded(shape: UnitShape, program: Program) -> int:
    """Elements of a unit's flat buffer: its weight is followed by the gap up to its bias."""
    group = Group(WORLD_SIZE, ShardSizes(*program.sizes))
    return group.padded(round_up(shape.numel - 3, PARAM_ALIGNMENT_NUMEL) + 3)


def order_of(program: Program) -> StepOrder:
    """The planner's description of the same program."""
    step, (param, grad, _) = program.steps[-1], program.sizes
    units = [
        OrderUnit(padded(shape, program), param > 1, grad > 1, shape.is_trained, reduces_at_end=i == step.root)
        for i, shape in enumerate(program.units)
    ]
    visits = tuple(Visit(i) for i in range(len(units)) if i != step.root)
    if step.root is not None:
        visits = (Visit(step.root, visits),)
    ahead, phases = min(step.warm_up, step.micro_batches - 1), []
    phases = [Phase(True, 0, index) for index in range(ahead)]
    for index in range(step.micro_batches):
        if index + ahead < step.micro_batches:
            phases.append(Phase(True, 0, index + ahead))
        phases.append(Phase(False, 0, index, index == step.micro_batches - 1))
    config = program.config
    schedule = Schedule(config.depth, config.param_slots, config.grad_slots)
    return StepOrder(units, [visits], phases, schedule)


def submitted_in_last_step(program: Program) -> list[tuple[str, str]]:
    """Of the engine, from one optimizer step to the next."""
    done = execute(program)
    # Param-syncs of untrained units do not exist: the first sync begins what the optimizer starts.
    syncs = [i for i, (lane, _) in enumerate(done.submitted) if lane == "param-sync"]
    per_step = sum(shape.is_trained for shape in program.units)
    return done.submitted[syncs[-2 * per_step] : syncs[-per_step]]


PROGRAMS = [program for seed in range(160) if (program := random_program(seed)).units][:160]
TRAINED = [one for one in PROGRAMS if any(shape.is_trained for shape in one.units)]


@pytest.mark.parametrize("part", range(4))
def test_the_planner_submits_what_the_engine_submits(part):
    for program in TRAINED[part:120:4]:
        engine = Counter(submitted_in_last_step(program))
        lanes = {kind: lane for lane, kind in LANES.items()}
        planned = Counter(
            (lanes[action.kind], f"u{action.unit}")
            for action in order_of(program).actions
            if action.kind != COMPUTE
        )
        assert planned == engine, program
