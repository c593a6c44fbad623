# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Views of gathered parameters that backward needs: right at every ring size and depth, also those
that autograd's hooks never see."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.comm.ring import Slot
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


def grads_after_two_steps(model: ToyLM, schedule: ScheduleConfig):
    """The first step records the order, the second prefetches; the gradients of the second."""
    trainer = EngineTrainer(model, SIZES, schedule=schedule)
    trainer.step(0, 1)
    trainer.runtime.zero_grads()
    toy_loss(model, toy_batch(1, 0, dist.get_rank())).backward()
    trainer.runtime.sync_grads()
    grads = [unit.main_grad.storage.clone() for unit in trainer.runtime.units]
    trainer.runtime.detach()
    return grads, trainer.runtime.gathers.warned


def check_every_ring_and_depth() -> None:
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    for kind in ("main-thread", "threaded"):
        for slots in (1, 2, 3, 4):
            for depth in (1, 2, 3, 4):
                schedule = ScheduleConfig(kind, depth, slots)
                grads, warned = grads_after_two_steps(build_toy(depth=4), schedule)
                assert all(map(torch.equal, grads, expected)), schedule
                assert not warned, schedule


def test_linear_layers_get_the_same_gradients_at_every_ring_size_and_depth():
    run_ranks(check_every_ring_and_depth, 4)


def check_hidden_views() -> bool:
    """Whether the gradients are right without the guard, which must make them right."""
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    schedule = ScheduleConfig("threaded", 2, 3)
    grads, warned = grads_after_two_steps(hide_weights(build_toy(depth=4)), schedule)
    assert all(map(torch.allclose, grads, expected)) and warned == {"views"}
    with mock.patch.object(Slot, "is_viewed", lambda *_, **__: False):
        grads, _ = grads_after_two_steps(hide_weights(build_toy(depth=4)), schedule)
    return all(map(torch.allclose, grads, expected))


def test_a_view_that_hooks_cannot_see_keeps_its_memory_and_without_that_guard_would_be_wrong():
    assert run_ranks(check_hidden_views, 4) == [False] * 4


def memory_of_hidden_views() -> list[int]:
    trainer = EngineTrainer(
        hide_weights(build_toy(depth=4)), SIZES, schedule=ScheduleConfig("threaded", 2)
    )
    rings = []
    for step in range(6):
        trainer.step(step, 2)
        rings.append(sum(trainer.runtime.ring_nbytes().values()))
    trainer.runtime.detach()
    return rings


def test_the_rings_keep_their_size_when_views_take_memory_with_them():
    for rings in run_ranks(memory_of_hidden_views, 4):
        assert len(set(rings)) == 1
