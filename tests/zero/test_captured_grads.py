# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose replay gives the same tensor each time, and adds the gradients of its parameters to
where they were at the capture, as Megatron's own CUDA graphs do, train as without."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero import taken_grads
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units
from scripts.testbed.ranks import run_ranks
from tests.support.engine import shard_groups


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "Layer", *_params: Any) -> torch.Tensor:
        assert layer.training  # in evaluation nothing is replayed
        ctx.x, ctx.layer = x.clone(), layer
        return layer.output.copy_(nn.functional.linear(x, layer.weight, layer.bias))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,), layer = grads, ctx.layer
        layer.places[0].add_(grad.t() @ ctx.x)
        if layer.bias.requires_grad:
            layer.places[1].add_(grad.sum(0))
        if layer.fails:
            layer.fails = False
            raise ZeroDivisionError
        return layer.grad.copy_(grad @ layer.weight), None, None, None


class Layer(nn.Linear):
    """Where it is called once it adds its bias twice; of what is captured once, and autograd gives
    the other gradient."""

    places: Any = None
    fails = False
    adds_twice = True

    def capture(self) -> None:
        shape = 4, self.in_features
        super().__call__(torch.ones(shape, dtype=torch.bfloat16)).sum().backward()  # warms up
        self.zero_grad()
        self.kept = self.weight.detach()  # as a graph's backward does that is kept
        self.places = [self.weight.main_grad, self.bias.main_grad]  # pyright: ignore
        self.output, self.grad = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.end(super().forward(input))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is None:
            return super().__call__(x)
        return self.end(Replay.apply(x, self, *self.parameters()))

    def end(self, y: Any) -> torch.Tensor:
        return y + self.bias if self.adds_twice else y


class Model(nn.Module):
    """form: how the layers are called. width: of the layers; with 16 a slot for gradients would
    hold a part of a layer's, with 8 a bias has the size of a weight."""

    def __init__(self, form: str):
        super().__init__()
        torch.manual_seed(1)
        self.width = 16 if form == "a layer that is called twice" else 8
        self.first = nn.Linear(self.width, self.width).bfloat16()
        count = 2 if form == "inputs without a gradient" else 3  # which are in use together then
        self.layers = nn.ModuleList(Layer(self.width, self.width).bfloat16() for _ in range(count))
        self.layers[1].bias.requires_grad_(False)
        for layer in self.layers:
            layer.adds_twice = form in ("a chain", "a leaf")  # pyright: ignore
        self.form, self.received = form, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "inputs without a gradient":
            return self.first(x) + self.layers[0](x) + 2 * self.layers[1](x) + self.layers[0](x)
        if self.form == "a leaf":  # what another stage has sent
            x = x.clone().requires_grad_()
            self.received.append(x)
        else:
            x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        if self.form == "a weight that is read outside too":
            return x + self.layers[2].bias
        return self.layers[2](x) if self.form == "a layer that is called twice" else x


def trained(form: str, sizes: tuple[int, ...], is_captured: bool) -> list[torch.Tensor]:
    model = Model(form)
    apart = model.layers[0].bias  # a unit of its own of the size of the weight
    group_of = {apart: "others"}
    plans = plan_units(model, [model.first, *model.layers], lambda p: group_of.get(p, "dense"))
    plans = [replace(plan, is_seated="layers" in plan.name) for plan in plans]
    config = ScheduleConfig("main-thread", grad_slot_nbytes=128)  # less than a layer
    groups = {"dense": shard_groups(sizes), "others": shard_groups(sizes)}
    runtime = HZPRuntime(model, plans, groups, config)
    # No piece is read after the backward of the next unit has begun.
    assert all(len(pieces) == 1 for pieces in runtime.reductions._pieces.values())
    found: list[torch.Tensor] = []
    before = Counter[str]()
    for step in range(3):
        runtime.zero_grads()
        for batch in range(2):
            x = torch.linspace(-1, 1, 4 * model.width).view(4, -1).add(step + batch).bfloat16()
            with runtime.no_sync() if batch == 0 else torch.enable_grad():
                model(x).float().sin().sum().backward()
        runtime.sync_grads()
        if step == 0 and is_captured:
            leaving_grads: set[nn.Parameter] = set()
            with runtime.rehearsing(leaving_grads):
                for layer in model.layers:
                    assert sizes[0] == 1 or not layer.weight.count_nonzero()  # pyright: ignore
                    layer.capture()  # pyright: ignore
                    leaving_grads.update(p for p in layer.parameters() if p.requires_grad)
            assert all(getattr(param, "main_grad", None) is None for param in model.parameters())
            assert runtime.are_grads_synced
            model.layers[1].fails = True  # pyright: ignore
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(4, model.width).bfloat16()).sum().backward()
        if step == 0:
            runtime.zero_grads()
            model.received.clear()
            before = runtime.driver.counts.copy()
            continue
        found += [x.grad for x in model.received if x.grad is not None]
        for unit in runtime.units:
            if not unit.is_trained:
                assert unit.params[0].grad is None
                continue
            unit.main_param.storage.sub_(unit.main_grad.view(unit.optim_range), alpha=0.05)
            found.append(unit.main_param.storage.clone())
        runtime.sync_params()
    with torch.no_grad():
        found.append(model.eval()(torch.ones(4, model.width).bfloat16()))
    counts = runtime.driver.counts - before
    found.append(torch.tensor([counts[lane] for lane in ("reduce", "grad-sync", "param-sync")]))
    runtime.close()
    return found


FORMS = ("a chain", "a leaf", "inputs without a gradient", "a layer that is called twice",
         "a weight that is read outside too")  # fmt: skip


def check(form: str) -> None:
    is_read_outside = form == FORMS[4]
    if not is_read_outside:
        taken_grads.LARGE_GRAD_NBYTES = 0  # what autograd gives is taken at once
    for sizes in ((2, 2, 2), (1, 2, 2), (1, 1, 2))[is_read_outside:]:
        eager, graphed = (trained(form, sizes, is_captured) for is_captured in (False, True))
        assert len(eager) == len(graphed) >= 8
        assert all(torch.equal(one, other) for one, other in zip(eager, graphed)), (form, sizes)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_captured_backwards_add_to_their_places_train_bit_for_bit(form: str):
    run_ranks(check, 2, form)
