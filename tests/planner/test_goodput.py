# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What failures cost, against runs whose failures are drawn; and how often to save."""

import random
from dataclasses import replace
from math import sqrt

import pytest

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.goodput import Failures, SaveTimes
from megatron_asynchzp.planner.model import Adapters, Batch, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from tests.planner.test_search import MODEL, slow

HOUR = 3600.0
# mean time between failures, restart, held, complete
RUNS = [
    SaveTimes(24 * HOUR, 600, 60, 60),  # training waits for the whole save
    SaveTimes(24 * HOUR, 600, 5, 300),
    SaveTimes(4 * HOUR, 900, 20, 600),
    SaveTimes(HOUR, 300, 0, 240),  # it waits for nothing
    SaveTimes(HOUR, 1800, 120, 900),
]


def drawn(saves: SaveTimes, interval_s: float, seed: int, failures: int = 4000) -> float:
    """The part of all time whose training counted, second by second as it goes."""
    rng, now, kept, seen = random.Random(seed), 0.0, 0.0, 0
    held_s = max(saves.held_s, saves.complete_s - interval_s)  # one save at a time
    fails = rng.expovariate(1 / saves.mtbf_s)
    while seen < failures:
        # From a restart: intervals follow each other; each save is complete a while after it began.
        begin, number = now, 0
        while True:
            number += 1
            ends = begin + number * interval_s + (number - 1) * held_s
            if ends + saves.complete_s > fails:
                break
        kept += (number - 1) * interval_s
        seen += 1
        now = fails
        while True:  # a failure within a restart starts it anew
            fails = now + rng.expovariate(1 / saves.mtbf_s)
            if fails > now + saves.restart_s:
                break
            now = fails
        now += saves.restart_s
    return kept / now


@pytest.mark.parametrize("saves", RUNS)
@pytest.mark.parametrize("times", [0.5, 1, 3])
def test_the_formula_is_what_failures_that_are_drawn_leave(saves, times):
    interval_s = times * saves.best_interval_s
    found = [drawn(saves, interval_s, seed) for seed in range(3)]
    assert sum(found) / 3 == pytest.approx(saves.goodput(interval_s), rel=0.03)


@pytest.mark.parametrize("saves", RUNS)
def test_no_interval_is_better_than_the_best(saves):
    best_s = saves.best_interval_s
    for times in (0.3, 0.8, 0.97, 1.03, 1.2, 3):
        assert saves.goodput(times * best_s) <= saves.goodput(best_s) * (1 + 1e-12)
    for step_s in (1.0, 7.0, 500.0):
        steps = saves.best_steps(step_s)
        for other in {max(1, steps - 1), steps + 1}:
            assert saves.goodput(other * step_s) <= saves.goodput(steps * step_s)


def test_with_rare_failures_it_is_youngs():
    for mean_s in (1e7, 1e8, 1e9):
        saves = SaveTimes(mean_s, 600, 30, 30)
        assert saves.best_interval_s == pytest.approx(sqrt(2 * 30 * mean_s), rel=0.01)


@pytest.mark.parametrize("name", ["mtbf_s", "restart_s", "held_s", "complete_s"])
def test_more_of_a_trouble_leaves_less_time(name):
    saves = SaveTimes(10 * HOUR, 600, 60, 120)
    worse = replace(saves, **{name: getattr(saves, name) * (0.5 if name == "mtbf_s" else 2)})
    assert worse.goodput(HOUR) < saves.goodput(HOUR) < 1
    assert SaveTimes(1.0, 1e6, 1e6, 1e6).goodput(1e6) == 0  # and no number overflows


def test_a_save_that_training_does_not_wait_for_is_made_more_often():
    failures = Failures(mtbf_hours=20_000, restart_s=600, copy_gb_s=10, save_gb_s=1)
    whole, beside = (failures.saves(1e12, 32, 256, is_async) for is_async in (False, True))
    assert (whole.held_s, whole.complete_s) == (31.25, 31.25)
    assert beside.held_s == pytest.approx(0.39, abs=0.01) and beside.complete_s > 31.25
    assert beside.best_interval_s < whole.best_interval_s
    assert beside.goodput(beside.best_interval_s) > whole.goodput(whole.best_interval_s)


def costing(model: Model = MODEL, **more) -> Costing:
    cluster = slow(4, 10.0)
    failures = Failures(5000, 600, 10, 2)
    cluster = replace(cluster, failures=failures, **more)
    sizes = ShardSizes(1, 1, cluster.num_ranks)
    return Costing(model, Plan(sizes, Parallel(), Batch(1, 4096)), cluster)


def test_a_checkpoint_has_fourteen_bytes_a_parameter():
    assert costing().saved_nbytes == 14 * MODEL.num_params
    fp32 = replace(MODEL, itemsize=4)
    assert costing(fp32).saved_nbytes == 12 * MODEL.num_params


@pytest.mark.parametrize("itemsize, adapter", [(2, 14), (4, 12)])
def test_a_checkpoint_has_no_moments_of_frozen_weights(itemsize, adapter):
    """Of low-rank adapters the weights alone: 2 or 4 bytes a frozen parameter."""
    model = replace(MODEL, itemsize=itemsize, adapters=Adapters(8, frozenset({"linear_qkv"})))
    trained = sum(unit.numel for unit in model.units if unit.is_trained)
    frozen = model.num_params - trained
    assert 0 < trained < frozen
    assert costing(model).saved_nbytes == adapter * trained + itemsize * frozen


def test_nothing_is_said_of_failures_that_no_file_states():
    one = costing()
    assert explain.saving(replace(one, cluster=slow(4, 10.0)), 1.0, False, 100) == ""
    line = explain.saving(one, 1.0, False, 100)
    assert line.startswith("a failure every 1,250.0 hours leaves to training 99.")
    assert " --save-interval 100 (1.67 min)" in line and "with --async-save --save-interval" in line
    assert explain.saving(one, 1.0, True, None).count("--save-interval") == 1
