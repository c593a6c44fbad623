# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchrony changes no number: inline, main-thread and threaded are bitwise equal, and so is an
update of each unit within backward."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, on_submit

TIED, BF16 = (torch.float32, {"is_tied": True}), (torch.bfloat16, {})
# Schedule, prefetch depth, and whether units are sent before the update. Each pair of them comes in
# one of two models; random programs have further sizes, depths and models.
CASES = [
    ((2, 2, 4), TIED, [("main-thread", 1, True), ("threaded", 3, True)]),
    ((1, 4, 4), BF16, [("inline", 3, True), ("main-thread", 3, False), ("threaded", 1, False)]),
]


def compare_schedules() -> None:
    for sizes, (dtype, kwargs), ways in CASES:
        seen = {}
        for kind, depth, sends_early in [("inline", 1, False), *ways]:
            trainer = EngineTrainer(
                build_toy(dtype, depth=5, **kwargs),
                sizes,
                schedule=ScheduleConfig(kind, depth, grad_slot_nbytes=2048 << 4 * (depth % 2)),
                sends_early=sends_early or None,
            )
            losses = [trainer.step(step, 1 + 2 * (step % 2)) for step in range(3)]
            params = trainer.full_params()
            trainer.runtime.close()
            seen[kind, depth, sends_early] = losses, params
        first_losses, first_params = seen["inline", 1, False]
        for name, (losses, params) in seen.items():
            assert losses == first_losses, (sizes, name)
            for key in params:
                assert torch.equal(params[key], first_params[key]), (sizes, name, key)


def test_the_three_schedules_are_bitwise_equal_on_4_ranks():
    run_ranks(compare_schedules, 4)


def train_two_blocks() -> dict[str, list[float]]:
    """All else is frozen: several reductions of one block are in flight at once."""
    losses = {}
    for kind in SCHEDULES:
        model = build_toy(depth=4)
        model.requires_grad_(False)
        model.blocks[2:].requires_grad_(True)
        schedule = ScheduleConfig(kind)
        trainer = EngineTrainer(model, (1, 2, 2), trains_all=False, schedule=schedule)
        losses[kind] = [trainer.step(step, 3) for step in range(4)]
        trainer.runtime.close()
    return losses


def test_the_three_schedules_are_equal_where_most_layers_are_frozen():
    losses = run_ranks(train_two_blocks, 4)[0]
    assert len(set(losses["inline"])) > 1
    assert losses["main-thread"] == losses["threaded"] == losses["inline"]


def submissions_of_a_step(
    sizes: tuple,
    sends_early: bool = False,
    dtype: torch.dtype = torch.float32,
    settles: bool = True,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Of the third step: the units in the order of their first use, and what was submitted, with
    `use UNIT` wherever a unit is used; and the size of each unit. settles: nothing is left to the
    step that follows."""
    model = build_toy(dtype, depth=5)
    trainer = EngineTrainer(model, sizes, sends_early=False if sends_early else None)
    runtime, events = trainer.runtime, []
    use = runtime.gathers.unshard

    def noted_use(unit, direction):
        events.append(f"use {unit.name}")
        use(unit, direction)

    on_submit(runtime.driver, lambda task: events.append(task.name))
    runtime.gathers.unshard = noted_use
    for step in range(3):
        events.clear()
        trainer.step(step, 2)
        if settles:
            runtime.settle()
    events = list(events)
    trainer.runtime.close()
    used = [event.removeprefix("use ") for event in events if event.startswith("use ")]
    numels = {unit.name: unit.layout.numel for unit in trainer.runtime.units}
    return list(dict.fromkeys(used)), events, numels


SIZES = [(1, 1, 4), (2, 2, 4)]
EARLY, EARLY_BF16 = ((2, 2, 4), True), ((2, 2, 4), True, torch.bfloat16)
ONE_AFTER_ANOTHER = [(sizes, False, torch.float32, False) for sizes in ((1, 2, 4), (2, 2, 4))]


def all_submissions() -> dict[tuple, tuple]:
    cases = [*((sizes,) for sizes in SIZES), EARLY, EARLY_BF16, *ONE_AFTER_ANOTHER]
    return {case: submissions_of_a_step(*case) for case in cases}


@pytest.fixture(scope="module")
def submitted() -> Callable[..., list[tuple]]:
    """What submissions_of_a_step returned with these arguments, by rank."""
    of_ranks = run_ranks(all_submissions, 4)
    return lambda *case: [found[case] for found in of_ranks]


@pytest.mark.parametrize("sizes", SIZES)
def test_parameter_shards_are_rebuilt_in_the_order_of_their_first_use(submitted, sizes):
    """A unit that is never gathered waits for its own shard only, not for those of the whole
    model: what comes last in the module tree may be used first."""
    for used, events, _ in submitted(sizes):
        synced = [event.removeprefix("param-sync ") for event in events if "param-sync" in event]
        assert synced == used


@pytest.mark.parametrize("case", ONE_AFTER_ANOTHER, ids=str)
def test_a_shard_is_rebuilt_a_few_units_ahead_of_its_use_and_not_all_at_once(submitted, case):
    """Of each size the unit that is gathered ahead (depth 1), and two more."""
    for used, events, numels in submitted(*case):
        forward = events[: events.index(f"use {used[-1]}") + 1]
        ahead = [u for u in used if f"param-sync {u}" not in forward]  # by the step before
        assert f"param-sync {used[-2]}" in forward
        for event in forward:
            what, unit = event.split()
            if what == "param-sync":
                ahead.append(unit)
                assert sum(numels[one] == numels[unit] for one in ahead) <= 3
            elif what in ("gather", "use"):
                assert unit in ahead
                if what == "use":
                    ahead.remove(unit)


def test_what_comes_before_the_first_layer_does_not_hold_up_its_gather(submitted):
    """Small units do not count against it: the gathers of all that the next step begins with are
    submitted with the rebuilding of their shards."""
    for used, events, _ in submitted((2, 2, 4)):
        after_step = events[events.index(f"param-sync {used[0]}") :]
        gathered = [event.removeprefix("gather ") for event in after_step if "gather" in event]
        assert used[1] != "blocks.0" and gathered == used[: used.index("blocks.0") + 1]


def test_a_unit_stays_gathered_until_something_else_has_to_be_gathered_first(submitted):
    """At the turn from forward to backward, where the output comes between."""
    for _, events, _ in submitted((2, 2, 4)):
        calls = [event for event in events if event.split()[0] in ("use", "gather")]
        turn = calls[calls.index("use output") :]
        assert "use blocks.4" in turn[: turn.index("use blocks.3")]
        assert "gather blocks.4" not in turn[: turn.index("use blocks.3")]


def test_a_third_of_the_shards_is_sent_before_the_update_evenly_over_backward(submitted):
    """As forward has two thirds of the time for them, and then meets them at an even pace."""
    for used, events, numels in submitted(*EARLY):
        in_backward, updated, rebuilt = [], 0, 0
        moves = [event.split() for event in events if event.split()[0].endswith("-sync")]
        last_update = max(i for i, (lane, _) in enumerate(moves) if lane == "grad-sync")
        for lane, unit in moves[: last_update + 1]:
            if lane == "grad-sync":
                assert 0 <= updated - 3 * rebuilt < 3 * max(numels.values())
                updated += numels[unit]
            else:
                rebuilt += numels[unit]
                in_backward.append(unit)
        assert updated == sum(numels.values()) and in_backward
        left = [unit for lane, unit in moves[last_update + 1 :]]
        assert [unit for unit in left if unit not in in_backward] == [
            unit for unit in used if unit not in in_backward
        ]


def test_no_shard_is_sent_before_the_update_where_gradients_are_twice_as_long_as_parameters(
    submitted,
):
    """In bf16 the gradients alone take two thirds of the traffic, as backward of the time."""
    for used, events, _ in submitted(*EARLY_BF16):
        moves = [event.split() for event in events if event.split()[0].endswith("-sync")]
        lanes = [lane for lane, _ in moves]
        assert lanes == sorted(lanes) and [unit for lane, unit in moves[-len(used) :]] == used


def train_with_late_comparisons(kind: str) -> list[float]:
    """The first rank comes late to every comparison of orders, while the others go on."""
    schedule = ScheduleConfig(kind)
    trainer = EngineTrainer(build_toy(), (1, 2, 2), schedule=schedule, sends_early=True)

    def delay_order(task: Task) -> None:
        start = task.start

        def start_late():
            if dist.get_rank() == 0:
                time.sleep(0.2)
            return start()

        if task.lane == "order":
            task.start = start_late

    on_submit(trainer.runtime.driver, delay_order)
    losses = [trainer.local_step(step, 1).item() for step in range(4)]
    trainer.runtime.close()
    return losses


def test_a_comparison_that_is_late_never_meets_a_reduction_of_the_next_step():
    """They share communicators, and what is sent before the update does not wait for it."""
    losses = {kind: run_ranks(train_with_late_comparisons, 2, kind) for kind in SCHEDULES}
    assert losses["threaded"] == losses["main-thread"] == losses["inline"]
