# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a layer that run in turn and are units of their own: nothing is computed differently,
and no more of them are in memory than the formula allows, whatever is computed again.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.zero.plan import plan_units
from tests.support.engine import EngineTrainer
from tests.support.toy_models import ExpertLM
from tests.support.world import on_ranks

NUM_EXPERTS = 4
# On two ranks every sum is that of two numbers, whatever else is in their unit.
SIZES = (2, 2, 2)
# Tokens of each expert on each rank, of 32: some get none, other ones on each rank.
COUNTS = ([0, 12, 0, 20], [16, 0, 16, 0])
# Of the layer in the middle nothing stays where forward turns to backward and back.
LAYERS, MIDDLE, STEPS, MICRO_BATCHES = 3, "blocks.1.experts", 2, 2
# What is computed again, experts in a unit, memory in flight from the least to the default.
# fmt: off
CHOICES = (("", 2, 0.0), ("", 1, 1.0), ("experts", 2, 0.4), ("experts", 1, 1.0),
           ("layer", 1, 0.0), ("layer", 2, 1.0))
# fmt: on


class Run(NamedTuple):
    """losses: of each step; params: by name; growth: of memory in flight, in bytes, beyond the
    formula's; gathers: of the experts of a layer in the middle, by step."""

    losses: list[float]
    params: dict[str, torch.Tensor]
    growth: int
    gathers: list[int]


class Comparison(NamedTuple):
    """What differs from the same model with all experts in their layer's unit."""

    again: str
    per_unit: int
    memory: float
    differs: list[str]
    growth: int
    gathers: list[int]


def new_trainer(per_unit: int, again: str, kind: str = "inline", memory: float = 1.0):
    torch.manual_seed(5)
    model = ExpertLM(per_unit, again, LAYERS, NUM_EXPERTS)
    for block in model.blocks:
        block.experts.counts = COUNTS[dist.get_rank()]
    return EngineTrainer(model, SIZES, schedule=ScheduleConfig(kind), memory=memory)


def train(*args) -> Run:
    trainer, losses = new_trainer(*args), []
    gathers, submit = [0] * STEPS, trainer.runtime.driver.submit

    def note(task):
        if task.lane == "gather" and task.unit.startswith(MIDDLE):
            gathers[len(losses)] += 1
        return submit(task)

    trainer.runtime.driver.submit = note
    for step in range(STEPS):
        losses.append(trainer.step(step, MICRO_BATCHES))
    trainer.runtime.driver.submit = submit
    allocated = trainer.runtime.in_flight_nbytes()["gathered parameters"]
    params = trainer.full_params()
    growth = allocated - trainer.runtime.memory.params
    trainer.runtime.detach()
    return Run(losses, params, growth, gathers)


def compare_all() -> list[Comparison]:
    found = []
    expected = {again: train(0, again) for again in dict.fromkeys(again for again, *_ in CHOICES)}
    for again, per_unit, memory in CHOICES:
        run, whole = train(per_unit, again, "threaded", memory), expected[again]
        pairs = ((name, run.params[name], other) for name, other in whole.params.items())
        differs = [name for name, mine, other in pairs if not torch.equal(mine, other)]
        differs += ["losses"] * (run.losses != whole.losses)
        found.append(Comparison(again, per_unit, memory, differs, run.growth, run.gathers))
    return found


def left_after_failure() -> tuple[bool, bool]:
    """Whether a forward that failed in the middle of a group changed the next step, and whether
    hooks on saved tensors are left behind."""

    def fail(*_: object) -> None:
        raise ArithmeticError("in the second of two experts in a unit")

    trainer, untouched = new_trainer(2, ""), new_trainer(2, "")
    expert = trainer.model.blocks[1].experts.local_experts[1]
    handle = expert.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        trainer.local_step(0, 1)
    handle.remove()
    one = torch.ones(2, requires_grad=True)
    has_hooks = (one * one).grad_fn._saved_self is not one
    differs = trainer.step(0, 2) != untouched.step(0, 2)
    for each in (trainer, untouched):
        each.runtime.detach()
    return differs, has_hooks


def run_all() -> tuple[list[Comparison], tuple[bool, bool]]:
    return compare_all(), left_after_failure()


@pytest.fixture(scope="module")
def ranks() -> list:
    return on_ranks(run_all, 2)


def test_experts_in_groups_are_the_same_in_every_bit_whatever_is_computed_again(ranks):
    for comparisons, _ in ranks:
        assert len(comparisons) == len(CHOICES)
        for comparison in comparisons:
            assert comparison.differs == [], comparison


def test_from_the_least_memory_to_the_default_no_more_groups_are_there_than_it_holds(ranks):
    for comparisons, _ in ranks:
        for comparison in comparisons:
            assert comparison.growth == 0, comparison


def test_a_group_is_gathered_in_each_direction_and_once_more_where_it_is_computed_again(ranks):
    for comparisons, _ in ranks:
        for comparison in comparisons:
            groups = NUM_EXPERTS // comparison.per_unit
            # Backward begins with the last groups, two of which memory still has by default.
            expected = 2 * groups + (groups - 2 if comparison.again else 0)
            if comparison.memory == 1.0:  # with less, what came ahead may go again
                assert comparison.gathers[-1] == MICRO_BATCHES * expected, comparison


def test_a_group_is_gathered_once_for_all_its_experts_before_their_order_is_known(ranks):
    for comparisons, _ in ranks:
        for comparison in comparisons:
            uses = (3 if comparison.again else 2) * NUM_EXPERTS // comparison.per_unit
            assert comparison.gathers[0] == MICRO_BATCHES * uses, comparison


def test_a_forward_that_fails_within_a_group_leaves_nothing_behind(ranks):
    assert [left for _, left in ranks] == [(False, False)] * 2


def test_experts_form_units_within_their_layer_in_the_order_of_their_calls():
    model = ExpertLM(2, depth=2)
    plans = plan_units(model, [*model.blocks, model.embedding], parts=model.parts)
    parts = [plan for plan in plans if plan.part]
    assert [plan.name for plan in parts] == [
        f"blocks.{layer}.experts.local_experts.{group}"
        for layer in range(2)
        for group in ("0-1", "2-3")
    ]
    assert [plan.layer for plan in parts] == ["blocks.0"] * 2 + ["blocks.1"] * 2
    assert [list(plan.modules) for plan in parts] == model.parts
    found = [param for plan in plans for _, param in plan.params]
    assert len(set(found)) == len(found) == len(list(model.parameters()))
