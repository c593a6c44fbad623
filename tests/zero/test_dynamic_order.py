# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Steps that depart, equally on all ranks, from the one before: the bits of the inline schedule,
and one warning about what is gathered on demand.
"""

import logging
from itertools import product
from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer
from tests.support.selection import slow_unless
from tests.support.toy_models import RoutedLM, toy_batch, toy_loss

ALL = [0, 1, 2, 3]
# By program: for each step the blocks of each micro-batch.
PROGRAMS = {
    "the same in every step": [[ALL, ALL]] * 4,
    "a module skipped in some steps": [[ALL, ALL], [ALL, [0, 2, 3]], [[0, 2, 3], ALL], [ALL, ALL]],
    "an early exit": [[ALL], [[0, 1]], [ALL], [[0, 1]], [[0]]],
    "no block at all": [[ALL], [[]], [ALL]],
    "more micro-batches in a later step": [[ALL], [ALL] * 3, [ALL] * 2, [ALL] * 4],
    "another order": [[ALL], [[3, 1, 0, 2]], [[0, 1, 3, 2]], [ALL]],
    "a module called twice": [[ALL], [[0, 1, 1, 2, 3]], [ALL], [[0, 0, 0]]],
    "a module called for the first time late": [[[0, 1]], [[0, 1]], [ALL], [ALL]],
}
# Whose recorded steps no later one contradicts.
WITHOUT_DEPARTURE = "the same in every step", "more micro-batches in a later step"
EVALUATED = ALL, [0, 1]  # which is a departure


def train(program: list, evaluates: bool, schedule: ScheduleConfig, sizes: tuple):
    """Losses, parameters and what was logged."""
    listener, logger = BufferingHandler(1000), logging.getLogger("megatron_asynchzp")
    logger.addHandler(listener)
    torch.manual_seed(5)
    trainer = EngineTrainer(RoutedLM(), sizes, schedule=schedule)
    losses = []
    for step, routes in enumerate(program):
        trainer.model.routes = [list(route) for route in routes]
        losses.append(trainer.step(step, len(routes)))
        if evaluates:
            with torch.no_grad():
                for index, route in enumerate(EVALUATED):
                    trainer.model.routes = [list(route)]
                    tokens = toy_batch(step, 50 + index, dist.get_rank())
                    losses.append(toy_loss(trainer.model, tokens).item())
    params = trainer.full_params()
    trainer.runtime.close()
    assert trainer.runtime.num_places_in_use() == 0
    logger.removeHandler(listener)
    return losses, params, [record.getMessage() for record in listener.buffer]


Case = tuple[str, bool]  # which program, and whether each step is followed by an evaluation
ALL_CASES: list[Case] = list(product(PROGRAMS, (False, True)))
# An evaluation is itself a departure: the fast tests have it after steps with none and with one.
FAST_CASES: list[Case] = [case for case in ALL_CASES if not case[1]]
FAST_CASES += [(WITHOUT_DEPARTURE[0], True)]


WAYS = [("main-thread", 2), ("threaded", 1), ("threaded", 4)]  # schedule and prefetch depth
FAST_WAYS = [("threaded", 4)]


def compare_with_inline(sizes: tuple, cases: list[Case], ways: list[tuple[str, int]]) -> dict:
    """What was logged, by case and schedule, where every bit was that of the inline schedule."""
    logged = {}
    for name, evaluates in cases:
        program = PROGRAMS[name]
        expected_losses, expected, _ = train(program, evaluates, ScheduleConfig("inline"), sizes)
        for kind, depth in ways:
            schedule = ScheduleConfig(kind, prefetch_depth=depth)
            losses, params, lines = train(program, evaluates, schedule, sizes)
            assert losses == expected_losses, (name, evaluates, kind, depth)
            for key in expected:
                assert torch.equal(params[key], expected[key]), (name, kind, depth, key)
            logged[name, evaluates, kind, depth] = lines
    return logged


@pytest.mark.parametrize(
    "sizes, cases, ways",
    [
        slow_unless(True, (2, 2, 2), FAST_CASES, FAST_WAYS, id="some"),
        slow_unless(False, (2, 2, 2), ALL_CASES, WAYS, id="all"),
        slow_unless(False, (2, 1, 2), ALL_CASES, WAYS, id="all, fewer gradient shards"),
    ],
)
def test_a_departure_changes_no_bit_and_is_logged_once_by_rank_0(sizes, cases, ways):
    first, second = run_ranks(compare_with_inline, 2, sizes, cases, ways)
    assert len(first) == len(cases) * len(ways)
    for (name, evaluates, *schedule), lines in first.items():
        if name in WITHOUT_DEPARTURE and not evaluates:
            assert lines == [], (name, schedule)
        else:
            (line,) = lines
            assert " where the step before used " in line, (name, schedule)
            assert line.endswith(" is gathered on demand (logged once)"), (name, schedule)
    assert all(lines == [] for lines in second.values())
