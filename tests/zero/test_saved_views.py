# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Views of gathered parameters that backward needs: right whatever memory and depth, also those
that autograd's hooks never see."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.comm.arena import Place
from megatron_asynchzp.testbed.ranks import run_ranks
from megatron_asynchzp.zero.config import ScheduleConfig
from tests.support.engine import EngineTrainer, build_toy
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

SIZES = (4, 4, 4)


class HiddenView(torch.autograd.Function):
    """A linear layer that keeps its weight where saved-tensor hooks do not look."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.hidden = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (x,) = ctx.saved_tensors
        return grad @ ctx.hidden.t(), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class HidingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HiddenView.apply(x, self.weight) + self.bias


def hide_weights(model: ToyLM) -> ToyLM:
    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.__class__ = HidingLinear
    return model


def grads_after_two_steps(model: ToyLM, schedule: ScheduleConfig, memory: float = 1.0):
    """The first step records the order, the second prefetches; the gradients of the second."""
    trainer = EngineTrainer(model, SIZES, schedule=schedule, memory=memory)
    trainer.step(0, 1)
    trainer.runtime.zero_grads()
    toy_loss(model, toy_batch(1, 0, dist.get_rank())).backward()
    trainer.runtime.sync_grads()
    grads = [unit.main_grad.storage.clone() for unit in trainer.runtime.units]
    trainer.runtime.detach()
    return grads, trainer.runtime.gathers.warned


def check_every_memory_and_depth() -> None:
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    for kind in ("main-thread", "threaded"):
        for memory in (0.0, 0.3, 0.6, 1.0):
            for depth in (1, 2, 3, 4):
                schedule = ScheduleConfig(kind, depth)
                grads, warned = grads_after_two_steps(build_toy(depth=4), schedule, memory)
                assert all(map(torch.equal, grads, expected)), schedule
                assert not warned, schedule


def test_linear_layers_get_the_same_gradients_whatever_memory_and_depth():
    run_ranks(check_every_memory_and_depth, 4)


def check_hidden_views() -> bool:
    """Whether the gradients are right without the guard, which must make them right."""
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    # With these some block lies elsewhere in backward than in forward.
    choice = ScheduleConfig("threaded", 3), 0.3
    grads, warned = grads_after_two_steps(hide_weights(build_toy(depth=4)), *choice)
    assert all(map(torch.allclose, grads, expected)) and warned == {"views"}
    with mock.patch.object(Place, "is_viewed", lambda *_, **__: False):
        grads, _ = grads_after_two_steps(hide_weights(build_toy(depth=4)), *choice)
    return all(map(torch.allclose, grads, expected))


def test_a_view_that_hooks_cannot_see_keeps_its_memory_and_without_that_guard_would_be_wrong():
    assert run_ranks(check_hidden_views, 4) == [False] * 4


def memory_of_hidden_views() -> list[int]:
    trainer = EngineTrainer(
        hide_weights(build_toy(depth=4)), SIZES, schedule=ScheduleConfig("threaded", 2)
    )
    in_flight = []
    for step in range(6):
        trainer.step(step, 2)
        in_flight.append(sum(trainer.runtime.in_flight_nbytes().values()))
    trainer.runtime.detach()
    return in_flight


def test_memory_in_flight_keeps_its_size_when_views_take_memory_with_them():
    for in_flight in run_ranks(memory_of_hidden_views, 4):
        assert len(set(in_flight)) == 1
