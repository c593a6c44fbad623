# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Views of gathered parameters that backward needs: right whatever memory and depth, also those
that autograd's hooks never see."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from megatron_asynchzp import ShardSizes, shard
from megatron_asynchzp.engine.comm.arena import Arena, Place
from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy
from tests.support.selection import slow_unless
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
    trainer.runtime.close()
    return grads, trainer.runtime.gathers.warned


def check_every_memory_and_depth(with_both_schedules: bool) -> None:
    """With both schedules, or now with the one and now with the other."""
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    memories, depths = (
        ((0.0, 0.3, 0.6, 1.0), (1, 2, 3, 4)) if with_both_schedules else ((0.3, 1.0), (1, 3))
    )
    for index, (memory, depth) in enumerate(product(memories, depths)):
        kinds = ("main-thread", "threaded")
        turn = (index + index // len(depths)) % 2
        for kind in kinds if with_both_schedules else kinds[turn : turn + 1]:
            schedule = ScheduleConfig(kind, depth)
            grads, warned = grads_after_two_steps(build_toy(depth=4), schedule, memory)
            assert all(map(torch.equal, grads, expected)), schedule
            assert not warned, schedule


@pytest.mark.parametrize("with_both_schedules", [False, slow_unless(False, True)])
def test_linear_layers_get_the_same_gradients_whatever_memory_and_depth(with_both_schedules):
    run_ranks(check_every_memory_and_depth, 4, with_both_schedules)


def other_places():
    """Every unit lies now at one end of memory in flight and now at the other."""
    turns, hold = cycle((False, True, True)), Arena.hold

    def hold_elsewhere(arena, nbytes, from_top=False):
        return hold(arena, nbytes, next(turns))

    return mock.patch.object(Arena, "hold", hold_elsewhere)


def check_hidden_views() -> bool:
    """Whether the gradients are right without the guard, which must make them right."""
    expected, _ = grads_after_two_steps(build_toy(depth=4), ScheduleConfig("inline"))
    schedule = ScheduleConfig("threaded", 2)
    with other_places():
        grads, warned = grads_after_two_steps(hide_weights(build_toy(depth=4)), schedule)
    assert all(map(torch.allclose, grads, expected)) and "views" in warned
    with other_places(), mock.patch.object(Place, "is_viewed", lambda *_, **__: False):
        grads, _ = grads_after_two_steps(hide_weights(build_toy(depth=4)), schedule)
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
    trainer.runtime.close()
    return in_flight


def test_memory_in_flight_keeps_its_size_when_views_take_memory_with_them():
    for in_flight in run_ranks(memory_of_hidden_views, 4):
        assert len(set(in_flight)) == 1


# ---- writes to what was saved


def add_to_an_output(h: torch.Tensor) -> torch.Tensor:
    return h.exp().add_(1)


def add_to_a_part_of_an_output(h: torch.Tensor) -> torch.Tensor:
    y = h.sigmoid()
    y[0].mul_(2)
    return y


def clear_an_input(h: torch.Tensor) -> torch.Tensor:
    y = h.square()
    h.detach().zero_()
    return y


def write_to_what_nothing_saved(h: torch.Tensor) -> torch.Tensor:
    return (h + 1).add_(h).relu_()


WRITES = (add_to_an_output, add_to_a_part_of_an_output, clear_an_input, write_to_what_nothing_saved)


class Writing(nn.Module):
    """A layer whose `write` may touch what the backward of another operation needs."""

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.up, self.down, self.write = nn.Linear(4, 6), nn.Linear(6, 4), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.write(self.up(x)))


def writing_model(write: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Writing(write) for _ in range(2)))


def through_a_checkpoint(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


WAYS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], AbstractContextManager]]] = {
    "called": (lambda model, x: model(x), nullcontext),
    "in a checkpoint": (through_a_checkpoint, nullcontext),
    "saved on the host": (lambda model, x: model(x), save_on_cpu),
}


def params_after_a_step(
    model: nn.Sequential, way: str, step: Callable[[], object]
) -> dict[str, torch.Tensor] | str:
    """The same batch on every rank. In torch's words, where it raises."""
    call, hooks = WAYS[way]
    try:
        with hooks():
            loss = call(model, torch.linspace(-1, 1, 12).view(3, 4)).square().sum()
        loss.backward()
    except RuntimeError as error:
        return str(error).partition(": [")[0]
    step()
    return {name: param.detach() for name, param in model.named_parameters()}


def check_writes(sizes: tuple[int, int, int]) -> None:
    for write, way in product(WRITES, WAYS):
        plain, model = writing_model(write), writing_model(write)
        update = torch.optim.SGD(plain.parameters(), lr=0.1).step
        new_sgd = partial(torch.optim.SGD, lr=0.1)
        with shard(model, list(model), ShardSizes(*sizes), new_sgd) as sharded:
            for _ in range(2):
                expected = params_after_a_step(plain, way, update)
                found = params_after_a_step(model, way, sharded.step)
                if isinstance(expected, str):
                    assert found == expected, (write.__name__, way)
                    break
                plain.zero_grad()
                sharded.zero_grad()
                for name, value in sharded.full_params():
                    torch.testing.assert_close(value, expected[name], msg=f"{write}, {way}")


def check_hooks_of_the_program() -> None:
    """The program's hooks see the activations that a plain model saves, and no weight; a backward
    of before an update is refused in torch's words."""
    x, model = torch.linspace(-1, 1, 12).view(3, 4), writing_model(add_to_an_output)
    for layer in model:
        layer.write = torch.tanh
    shapes: dict[bool, list[torch.Size]] = {False: [], True: []}

    def loss_of(is_sharded: bool) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if len(tensor) == len(x):  # no weight
                shapes[is_sharded].append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(x).square().sum()

    loss_of(False)
    new_sgd, early = partial(torch.optim.SGD, lr=0.1), list[torch.Size]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        early.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        sharded = shard(model, list(model), ShardSizes(2, 2, 2), new_sgd)
        model(x).square().sum()  # under hooks that are older than the engine's
    assert [shape for shape in early if shape[0] == len(x)] == shapes[False]
    with sharded:
        for _ in range(2):  # in the second step a unit may go without the engine's hooks
            shapes[True].clear()
            late = model(x).sum()
            loss_of(True).backward()
            assert shapes[True] == shapes[False] and len(shapes[False]) >= 6
            sharded.step()
            words = r"\[parameters of .*\] is at version (\d+); expected version (\d+) instead"
            with pytest.raises(RuntimeError, match=words) as refused:
                late.backward()
            now, then = map(int, re.search(words, str(refused.value)).groups())  # pyright: ignore
            assert now > then
            sharded.zero_grad()


def test_the_programs_hooks_see_activations_and_an_old_backward_is_refused_with_both_versions():
    run_ranks(check_hooks_of_the_program, 2)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2)])
def test_a_write_to_what_backward_needs_raises_as_in_torch_and_any_other_changes_nothing(sizes):
    run_ranks(check_writes, 2, sizes)
