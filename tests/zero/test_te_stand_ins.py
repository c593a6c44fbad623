# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that treat their weights as Transformer Engine's do are trained as stock torch trains
them, also where they write weight gradients themselves."""

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, nested_sizes
from tests.support.selection import slow_unless
from tests.support.te_stand_ins import build_te_toy
from tests.support.toy_models import toy_batch, toy_loss

STEPS, MICRO_BATCHES = 3, 2
MODELS = (
    {},
    {"is_tied": True},
    {"recompute": True},
    {"is_repeated": True},
    {"is_repeated": True, "recompute": True},
)
SCHEDULES = (ScheduleConfig("threaded"), ScheduleConfig("main-thread", 2), ScheduleConfig("inline"))


def stock_params(**toy) -> dict[str, torch.Tensor]:
    """What plain torch makes of the batches of all ranks, in this process."""
    model = build_te_toy(is_stock=True, **toy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    world_size = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            for rank in range(world_size):
                loss = toy_loss(model, toy_batch(step, index, rank))
                (loss / MICRO_BATCHES / world_size).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained_params(sizes, schedule: ScheduleConfig, is_fused: bool, **toy):
    """What the engine makes of them."""
    model = build_te_toy(is_fused=is_fused, **toy)
    trainer = EngineTrainer(model, sizes, schedule=schedule, fuses_grads=is_fused)
    for step in range(STEPS):
        trainer.step(step, MICRO_BATCHES)
    params = trainer.full_params()
    trainer.runtime.close()
    return params


def compare_with_stock(every: int) -> int:
    """Every model with every nesting, or every second one, and a schedule each; how many."""
    num_compared = 0
    for number, toy in enumerate(MODELS):
        expected = stock_params(**toy)
        nestings = list(enumerate(nested_sizes(dist.get_world_size())))
        for index, sizes in nestings[number % every :: every]:
            schedule = SCHEDULES[index % len(SCHEDULES)]
            mine = trained_params(sizes, schedule, is_fused=False, **toy)
            fused = trained_params(sizes, schedule, is_fused=True, **toy)
            assert mine.keys() == fused.keys() == expected.keys()
            # Without fusion autograd adds up what a weight gets from several calls; with it each is
            # added to the sum of the micro-batches.
            adds_otherwise = sizes[1] == 1 and bool({"is_tied", "is_repeated"} & toy.keys())
            for name, param in expected.items():
                what = f"{toy} {sizes} {schedule.kind} {name}"
                # Adam turns a rounding error of a tiny gradient into a part of a step of 1e-2.
                torch.testing.assert_close(mine[name], param, rtol=0, atol=1e-4, msg=what)
                torch.testing.assert_close(
                    fused[name], mine[name], rtol=0, atol=1e-4 if adds_otherwise else 0, msg=what
                )
            num_compared += 1
    return num_compared


@pytest.mark.parametrize("every", [2, slow_unless(False, 1)])
def test_stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_themselves(every):
    least = len(MODELS) * (len(nested_sizes(2)) // every)
    assert all(compared >= least > 5 for compared in run_ranks(compare_with_stock, 2, every))


def call_twice_from_second_step_on() -> str:
    """What a unit that overwrites its gradients does then."""
    model = build_te_toy(is_fused=True)
    trainer = EngineTrainer(model, (2, 2, 2), schedule=SCHEDULES[-1], fuses_grads=True)
    trainer.step(0, 1)
    trainer.step(1, 1)
    model.blocks[1] = model.blocks[0]
    with pytest.raises(RuntimeError) as raised:
        trainer.step(2, 1)
    trainer.runtime.close()
    return str(raised.value)


def test_a_second_call_that_would_overwrite_the_gradient_of_the_first_is_refused():
    for message in run_ranks(call_twice_from_second_step_on, 2):
        assert message.startswith("blocks.0 is called twice in a forward of step 3")
        assert message.endswith("add --no-gradient-accumulation-fusion")
