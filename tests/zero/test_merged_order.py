# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of the engine and of Megatron on devices with streams: issued by the threads that
compute they have one order on all ranks and no device gets stuck."""

from itertools import product

import pytest
import torch

from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.schedule import ScheduleConfig
from tests.support.device_queues import CommandLog, Connections, Wait, find_stuck
from tests.support.parallel_layouts import LAYOUTS, WORLD, Layout, log_rank, log_ranks, order_of
from tests.support.recording_device import DEFAULT_STREAM, Group
from tests.support.selection import slow_unless

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


# ---- the model of a device

A, B = Group("a", (0, 1)), Group("b", (0, 1))


def log_of(*groups: Group):
    """A rank that issues these collectives from its main stream, and waits for each."""
    device = CommandLog()
    for group in groups:
        device.collective("all-reduce", group, torch.zeros(4)).wait()
    return device.commands


def test_two_groups_in_opposite_orders_get_stuck_where_each_is_awaited():
    crossed = {0: log_of(A, B), 1: log_of(B, A)}
    for num_queues in NUM_QUEUES:
        stuck = find_any_stuck(crossed, num_queues)
        assert stuck is not None and set(stuck) == {0, 1}
    assert find_any_stuck({0: log_of(A, B), 1: log_of(A, B)}, 1) is None
