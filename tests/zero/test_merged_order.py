# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of the engine and of Megatron on devices with streams: issued by the threads that
compute they have one order on all ranks and no device gets stuck."""

import random
from itertools import product

import pytest
import torch

from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.plan import plan_units
from tests.support.device_queues import Command, CommandLog, Connections, Wait, find_stuck
from tests.support.foreign_blocks import use_foreign_blocks
from tests.support.parallel_layouts import LAYOUTS, WORLD, Layout, log_rank, log_ranks, order_of
from tests.support.recording_device import DEFAULT_STREAM, Group
from tests.support.scheduler_program import delayed_driver, recorded_groups
from tests.support.selection import slow_unless
from tests.support.side_stream import AutogradStreams
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

SEEDS = range(200)
BY_THE_PROGRAM = ScheduleConfig("main-thread")
NUM_QUEUES, MAPPINGS = (1, 2, 8, 32), range(5)

per_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def first_departure(layout: Layout, config: ScheduleConfig, seeds) -> int | None:
    """The first seed with which a rank has another order than the first of its sharding group.

    Ranks are recorded one by one and do not know of each other. So a seed for each rank in turn is
    enough: where none differs, ranks with any of these seeds beside each other have one order.
    """
    expected = {}
    for seed in seeds:
        rank = WORLD[seed % len(WORLD)]
        group = next(ranks for ranks in layout.sharding if rank in ranks)
        order = order_of(log_rank(layout, rank, config, seed))
        if order != expected.setdefault(group, order):
            return seed
    return None


@per_layout
@pytest.mark.parametrize("seeds", [slow_unless(True, SEEDS[:40]), slow_unless(False, SEEDS)])
def test_all_collectives_have_one_order_on_all_ranks_however_late_a_thread_is(layout, seeds):
    assert first_departure(layout, BY_THE_PROGRAM, seeds) is None


@per_layout
def test_every_rank_issues_ours_between_the_foreign_ones(layout):
    for commands in log_ranks(layout, BY_THE_PROGRAM, seed=0).values():
        purposes = [purpose for _, purpose, *_ in order_of(commands)]
        assert {"gather", "reduce", "norm", layout.name} <= set(purposes)
        foreign = [index for index, purpose in enumerate(purposes) if purpose == layout.name]
        assert any(later - index > 1 for index, later in zip(foreign, foreign[1:]))


def find_any_stuck(commands, num_queues: int):
    """What is stuck in any of some mappings of streams onto so many queues."""
    for holds, mapping in product((False, True), MAPPINGS):
        if stuck := find_stuck(commands, Connections(num_queues, holds, mapping)):
            return stuck
    return None


@per_layout
@pytest.mark.parametrize("num_queues", NUM_QUEUES)
def test_no_number_of_hardware_queues_closes_a_circle(layout, num_queues):
    assert find_any_stuck(log_ranks(layout, BY_THE_PROGRAM, seed=0), num_queues) is None


@per_layout
def test_a_submission_makes_the_stream_that_computes_wait_for_nothing(layout, monkeypatch):
    honest, num_seen = Driver.submit, []

    def watched_submit(driver: Driver, task: Task) -> Task:
        before = list(driver.device.commands)
        honest(driver, task)
        num_seen.append(len(driver.device.commands) - len(before))
        for command in driver.device.commands[len(before) :]:
            assert not (isinstance(command, Wait) and command.stream == DEFAULT_STREAM), task.title
        return task

    monkeypatch.setattr(Driver, "submit", watched_submit)
    log_rank(layout, 0, BY_THE_PROGRAM, seed=0)
    assert sum(num_seen) > 50


# ---- a model whose layers communicate, and whose backward autograd runs on another thread


def log_training(rank: int, config: ScheduleConfig, seed: int) -> list[Command]:
    """Two steps of `rank` in TP2 x DP2."""
    dice = random.Random(f"{seed} {rank}")
    device = CommandLog(lambda: 5e-4 if dice.random() < 0.02 else 0.0)
    streams, layout = AutogradStreams(device), LAYOUTS[0]
    tensor_parallel, sharding = (
        next(ranks for ranks in groups if rank in ranks)
        for groups in (layout.foreign, layout.sharding)
    )
    with device.recording(), streams.applied():
        model = ToyLM(vocab=11, width=8, depth=3, recompute=seed % 2 == 1)
        use_foreign_blocks(model, streams, Group(layout.name, tensor_parallel))
        streams.watch(model)
        driver = delayed_driver(device, config, dice.randrange(10**9))
        groups = {"dense": recorded_groups(layout.sizes, rank, sharding)}
        plans = plan_units(model, [*model.blocks, model.embedding, model.output])
        runtime = HZPRuntime(model, plans, groups, config, driver)
        for step in range(2):
            runtime.zero_grads()
            for index in range(2):
                runtime.is_last_micro_batch = index == 1
                streams.backward(toy_loss(model, toy_batch(step, index, rank, vocab=11)))
            runtime.sync_grads()
            runtime.sync_params()
        runtime.close()
        driver.close()
    return device.commands


@pytest.mark.parametrize("seeds", [range(0, 20, 2), range(1, 20, 2)], ids=["", "recomputed"])
def test_the_hooks_of_a_model_issue_ours_between_those_of_its_layers_in_one_order(seeds):
    logs = {rank: log_training(rank, BY_THE_PROGRAM, seeds[0]) for rank in WORLD}
    expected = order_of(logs[0])
    foreign = [index for index, (_, purpose, *_) in enumerate(expected) if purpose == "tp"]
    assert any(later - index > 1 for index, later in zip(foreign, foreign[1:]))
    assert all(order_of(commands) == expected for commands in logs.values())
    for seed in seeds:
        assert order_of(log_training(WORLD[seed // 2 % 4], BY_THE_PROGRAM, seed)) == expected
    for num_queues in NUM_QUEUES:
        assert find_any_stuck(logs, num_queues) is None


# ---- the model of a device

A, B = Group("a", (0, 1)), Group("b", (0, 1))


def log_of(*groups: Group, awaits: bool = True):
    """A rank that issues these collectives from its main stream, and waits for each."""
    device = CommandLog()
    for group in groups:
        work = device.collective("all-reduce", group, torch.zeros(4))
        if awaits:
            work.wait()
    return device.commands


def test_two_groups_in_opposite_orders_get_stuck_where_each_is_awaited():
    crossed = {0: log_of(A, B), 1: log_of(B, A)}
    for num_queues in NUM_QUEUES:
        stuck = find_any_stuck(crossed, num_queues)
        assert stuck is not None and set(stuck) == {0, 1}
    assert find_any_stuck({0: log_of(A, B), 1: log_of(A, B)}, 1) is None


def test_opposite_orders_that_nobody_awaits_need_a_queue_each_where_collectives_hold_theirs():
    crossed = {0: log_of(A, B, awaits=False), 1: log_of(B, A, awaits=False)}
    assert find_stuck(crossed, Connections(1)) == {}
    assert find_stuck(crossed, Connections(1, holds=True))
    apart = [find_stuck(crossed, Connections(32, True, seed)) == {} for seed in MAPPINGS]
    assert any(apart)


def test_a_stream_that_nothing_orders_is_held_up_by_what_is_before_it_in_its_queue():
    # Rank 0 waits in one stream for A before it issues B in another; rank 1 needs B for A.
    device = CommandLog()
    with device.on_stream("one"):
        device.collective("all-reduce", A, torch.zeros(4)).wait()
    with device.on_stream("other"):
        device.collective("all-reduce", B, torch.zeros(4)).wait()
    commands = {0: device.commands, 1: log_of(B, A)}
    assert find_stuck(commands, Connections(1))
    assert any(find_stuck(commands, Connections(32, seed=seed)) == {} for seed in MAPPINGS)


def test_ranks_that_issue_different_collectives_of_one_group_get_stuck():
    other = CommandLog()
    other.collective("all-gather", A, torch.zeros(4))
    assert set(find_stuck({0: log_of(A), 1: other.commands}, Connections(32))) == {0}
