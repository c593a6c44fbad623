# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a layer that run in turn and are units of their own: nothing is computed differently,
and no more of them are in memory than the formula allows, whatever is computed again.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.zero.config import ScheduleConfig
from megatron_asynchzp.zero.plan import plan_units
from tests.support.engine import EngineTrainer, build_toy
from tests.support.toy_models import ExpertLM
from tests.support.world import on_ranks

NUM_EXPERTS = 4
AGAIN = ("", "experts", "layer")
# On two ranks every sum is that of two numbers, whatever else is in their unit.
SIZES = (2, 2, 2)
# Tokens of each expert on each rank, of 32: some get none, other ones on each rank.
COUNTS = ([0, 12, 0, 20], [16, 0, 16, 0])


class Run(NamedTuple):
    """losses: of each step; params: by name; growth: of memory in flight, in bytes, beyond the
    formula's; gathers: of one step in the steady state, by unit."""

    losses: list[float]
    params: dict[str, torch.Tensor]
    growth: int
    gathers: list[str]


def new_model(per_unit: int, again: str) -> ExpertLM:
    torch.manual_seed(5)
    model = ExpertLM(per_unit, again, number=NUM_EXPERTS)
    for block in model.blocks:
        block.experts.counts = COUNTS[dist.get_rank()]
    return model


def train(per_unit: int, again: str, kind: str = "threaded", memory: float = 1.0) -> Run:
    schedule = ScheduleConfig(kind)
    trainer = EngineTrainer(new_model(per_unit, again), SIZES, schedule=schedule, memory=memory)
    losses, gathers = [], []
    submit = trainer.runtime.driver.submit

    def note(task):
        if task.lane == "gather":
            gathers.append(task.unit)
        return submit(task)

    for step in range(3):
        if step == 2:
            trainer.runtime.driver.submit = note
        losses.append(trainer.step(step, 2))
    allocated = trainer.runtime.in_flight_nbytes()["gathered parameters"]
    params = trainer.full_params()
    growth = allocated - trainer.runtime.memory.params
    trainer.runtime.detach()
    return Run(losses, params, growth, gathers)


def check_numbers() -> None:
    for again in AGAIN:
        expected = train(0, again, "inline")
        for per_unit, kind in itertools.product((1, 2, 4), ("inline", "threaded")):
            found = train(per_unit, again, kind)
            assert found.losses == expected.losses, (again, per_unit, kind)
            for name, param in expected.params.items():
                assert torch.equal(found.params[name], param), (again, per_unit, kind, name)


def check_memory() -> None:
    for again, per_unit in itertools.product(AGAIN, (1, 2)):
        for memory in (0.0, 0.2, 0.5, 0.8, 1.0):
            found = train(per_unit, again, memory=memory)
            assert found.growth == 0, (again, per_unit, memory)


def check_gathers() -> None:
    """Of the experts of one layer in two micro-batches."""
    for again, per_unit in itertools.product(AGAIN, (1, 2)):
        groups = NUM_EXPERTS // per_unit
        found = train(per_unit, again, "inline", memory=0.0)
        gathers = [name for name in found.gathers if name.startswith("blocks.1.experts")]
        # In forward, again before backward, and there, where the last one is there already. Without
        # computing again the last layer's are: not those of layer 1.
        of_micro_batch = 3 * groups - 1 if again else 2 * groups
        assert len(gathers) == 2 * of_micro_batch, (again, per_unit, gathers)


def check_failure() -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("of the second of two experts in a unit")

    trainer, expected = (EngineTrainer(new_model(2, ""), SIZES) for _ in range(2))
    expert = trainer.model.blocks[1].experts.local_experts[1]
    handle = expert.register_forward_pre_hook(fail)
    trainer.runtime.zero_grads()
    with pytest.raises(ArithmeticError):
        trainer.local_step(0, 1)
    handle.remove()
    assert trainer.step(0, 2) == expected.step(0, 2)
    x = torch.ones(2, requires_grad=True)
    # What is saved outside of a forward meets no hook of ours: it is the very tensor.
    assert (x * x).grad_fn._saved_self is x
    for one in (trainer, expected):
        one.runtime.detach()


@pytest.mark.parametrize("check", [check_numbers, check_memory, check_gathers, check_failure])
def test_parts(check):
    on_ranks(check, 2)


def test_experts_form_units_of_their_layer_in_the_order_of_their_calls():
    model = build_toy()
    torch.manual_seed(0)
    model = ExpertLM(2, depth=2)
    plans = plan_units(model, [*model.blocks, model.embedding], parts=model.parts)
    names = [plan.name for plan in plans if plan.part]
    assert names == [
        f"blocks.{layer}.experts.local_experts.{group}"
        for layer in range(2)
        for group in ("0-1", "2-3")
    ]
    for plan in plans:
        assert (
            plan.layer
            == ("blocks" + plan.name[6:8] if plan.name.startswith("blocks") else plan.name)
            or plan.name == "root"
        )
        assert plan.runs_in_turn == bool(plan.part) and len(plan.modules) == 1 + bool(plan.part)
    found = [param for plan in plans for _, param in plan.params]
    assert len(found) == len(set(found)) == len(list(model.parameters()))
