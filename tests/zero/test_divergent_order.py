# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different modules never get a number out of that step: the comparison of what was
issued names the first difference on every rank, or a collective fails by name.
"""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.order_check import OrderCheck, OrderMismatch
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import Timeline
from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from scripts.testbed.ranks import observe_ranks, run_ranks
from tests.support.engine import EngineTrainer, build_toy, shard_groups
from tests.support.selection import slow_unless
from tests.support.toy_models import RoutedLM

ALL = [0, 1, 2, 3]


def diverge(kind: str, sizes: tuple, limit_s: float, num_equal: int, routes: list, count: int):
    """What ended the step in which rank 1 does something else, or the number it gave.

    num_equal: steps before that one; routes, count: what rank 1 does in its micro-batches, of
    which the others have two.
    """
    torch.manual_seed(5)
    schedule = ScheduleConfig(kind, prefetch_depth=2, time_limit_s=limit_s)
    trainer = EngineTrainer(RoutedLM(), sizes, schedule=schedule)
    for step in range(num_equal):
        trainer.local_step(step, 2)
    if dist.get_rank() == 1:
        trainer.model.routes = [list(route) for route in routes]
    try:
        loss = trainer.local_step(num_equal, count if dist.get_rank() == 1 else 2)
        trainer.runtime.settle()
    except (OrderMismatch, CollectiveFailure) as error:
        with pytest.raises(type(error)) as again:
            trainer.runtime.close()
        assert again.value is error
        return f"{type(error).__name__}: {error}"
    return f"a loss of {loss.item()}"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_two_swapped_modules_of_one_size_are_named_with_one_message_on_all_ranks(kind):
    """In a first step every collective finds a partner, so that only the comparison sees it."""
    routes = [[1, 0, 2, 3], [1, 0, 2, 3]]
    messages = observe_ranks(diverge, 4, kind, (2, 2, 4), 60.0, 0, routes, 2, num_survivors=4)
    assert sorted(messages) == [0, 1, 2, 3]
    (message,) = set(messages.values())
    assert re.fullmatch(
        r"OrderMismatch: step 1: collective \d+ since the last comparison was 'gather blocks.0' on "
        r"rank 0 and 'gather blocks.1' on rank 1; every rank must call .*",
        message,
    )


# What rank 1 does in its micro-batches, and how many it has.
DIVERGENCES = {
    "a module skipped once": ([[0, 2, 3], ALL], 2),
    "an early exit": ([[0, 1], [0, 1]], 2),
    "a module called twice": ([ALL, [0, 1, 1, 2, 3]], 2),
    "one more micro-batch": ([], 3),
    "one micro-batch less": ([], 1),
}


@pytest.mark.parametrize(
    "kind, name",
    [
        slow_unless(kind == "threaded" or name == "a module skipped once", kind, name)
        for kind in SCHEDULES
        for name in DIVERGENCES
    ],
)
def test_one_rank_that_does_something_else_gets_no_number_and_nor_do_its_peers(kind, name):
    routes, micro_batches = DIVERGENCES[name]
    messages = observe_ranks(
        diverge, 2, kind, (2, 2, 2), 2.0, 2, routes, micro_batches, num_survivors=2
    )
    # gloo itself aborts a process whose peer sends more than it expects: the other one is left.
    assert messages and set(messages) <= {0, 1}
    for text in messages.values():
        assert re.match(r"OrderMismatch: step 3: |CollectiveFailure: .* in step [34] failed", text)
        assert "\n" not in text


# --- the comparison alone ----------------------------------------------------------------------


SAME, OTHER = ["gather a", "reduce a"], ["gather a", "reduce a", "gather a", "reduce a"]
END = "; every rank must call the same modules in the same order"
# What each rank submits, and what is said. Ranks 0 and 1 compute in step, and so do 2 and 3.
COMPARISONS = [
    ([SAME, SAME, SAME, SAME], ""),
    (
        [SAME, SAME, SAME, ["gather a", "reduce b"]],
        f"'reduce a' on rank 2 and 'reduce b' on rank 3{END}",
    ),
    ([SAME, SAME, SAME, ["gather a"]], f"'reduce a' on rank 2 and 'nothing' on rank 3{END}"),
    ([[], SAME, SAME, SAME], f"'nothing' on rank 0 and 'gather a' on rank 1{END}"),
    (
        [["gather a"], ["gather b"], ["gather c"], ["gather a"]],
        f"'gather a' on rank 0 and 'gather b' on rank 1{END}",
    ),
    ([SAME, SAME, OTHER, OTHER], ""),
    ([[], [], OTHER, OTHER], ""),
    (
        [[*SAME, "grad-sync a"], [*SAME, "grad-sync a"], *[[*OTHER, "grad-sync b"]] * 2],
        f"'grad-sync a' on ranks 0, 1 and 'grad-sync b' on ranks 2, 3{END}",
    ),
    (
        [["param-sync a", "param-sync b"]] * 3 + [["param-sync b", "param-sync a"]],
        f"'param-sync a' on rank 2 and 'param-sync b' on rank 3{END}",
    ),
    ([*[[*SAME, "grad-sync a"]] * 2, *[["grad-sync a", *OTHER]] * 2], ""),
    (
        [[*SAME, "grad-sync a"], ["grad-sync a", *SAME], *[[*SAME, "grad-sync a"]] * 2],
        f"'gather a' on rank 0 and 'grad-sync a' on rank 1{END}",
    ),
    ([SAME, SAME, SAME, SAME], ""),
]


def compare_orders() -> list[str]:
    """What each comparison raised."""
    groups = shard_groups((2, 2, 4))

    def new_check() -> tuple[Driver, OrderCheck]:
        driver = Driver(Timeline(CpuDevice()))
        axes, num_in_step = groups.all_reduce_axes, groups.num_axes_in_step
        return driver, OrderCheck(driver, axes, num_in_step, torch.device("cpu"))

    messages = []
    driver, check = new_check()
    for program, _ in COMPARISONS:
        for lane, unit in map(str.split, program[dist.get_rank()]):
            driver.submit(Task(lane, unit, (), lambda: iter(())))
        try:
            check.start()
            check.finish()
            messages.append("")
        except OrderMismatch as mismatch:
            messages.append(str(mismatch).partition(" since the last comparison was ")[2])
            driver, check = new_check()  # a mismatch ends the use of a driver
    return messages


def test_the_comparison_names_the_first_difference_and_who_did_what_on_every_rank():
    assert run_ranks(compare_orders, 4) == [[said for _, said in COMPARISONS]] * 4


def count_submissions_kept() -> dict[bool, list[int]]:
    lengths = {}
    for checks_order in (True, False):
        schedule = ScheduleConfig(checks_order=checks_order)
        trainer = EngineTrainer(build_toy(), (1, 2, 2), schedule=schedule)
        lengths[checks_order] = []
        for step in range(4):
            trainer.step(step, 2)
            lengths[checks_order].append(len(trainer.runtime.driver.submitted.entries))
        trainer.runtime.close()
    return lengths


def test_what_was_submitted_is_forgotten_every_step_also_where_nothing_is_compared():
    for lengths in run_ranks(count_submissions_kept, 2):
        assert len(set(lengths[False][1:])) == 1
        assert max(lengths[False]) <= max(lengths[True])
