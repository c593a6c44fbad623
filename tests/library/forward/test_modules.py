# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What people do in their modules: what these are handed, write into, return and keep. It trains as
in one process, or is refused by name in the first forward that does it."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatron_asynchzp import ConfigurationError, ScheduleConfig, ShardSizes, shard
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from scripts.testbed.ranks import run_ranks
from tests.support import loops
from tests.support.hooks_of_others import check_hooks_of_others
from tests.support.loops import SIZES, STEPS, Sizes, unclipped, unclipped_step
from tests.support.selection import slow_unless

SIZES_OF_4: Sequence[Sizes] = [(1, 1, 1), *SIZES, (2, 2, 4)]
WIDTH = 8


@dataclass
class Result:
    hidden: torch.Tensor


class Closed:
    """An object that shows its tensor nowhere."""

    def __init__(self, hidden: torch.Tensor):
        self.get = lambda: hidden


class Cache:
    """As transformers' caches: lists in an object, which layers append to."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []


class Layer(nn.Module):
    """One layer, whose norm and gate save the parameter itself, and whose linear layer a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.rand(WIDTH))
        self.has_linear = True

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) * self.gate
        return torch.tanh(self.linear(y)) if self.has_linear else y

    def forward(self, x: Any, form: str = "", extra: Any = None) -> Any:
        if form == "in place":
            return self.compute(functional.relu(x, inplace=True))
        if form == "list":
            x.append(self.compute(x[-1]))
            return None
        if form == "dict":
            x["hidden"] = self.compute(x["hidden"])
            x["number"] = x.get("number", 0) + 1
            return x
        if form == "nested":
            x[0]["all"].append(self.compute(x[0]["all"][-1]))
            return None
        if form == "cache":
            extra.layers.append(x * 2)
            return self.compute(x) + sum(extra.layers)
        y = self.compute(x)
        if form == "attribute":
            self.loss = y.square().mean()
            return x
        if form == "namespace":
            return SimpleNamespace(h=[y])
        return {"dataclass": Result, "closed": Closed}.get(form, torch.clone)(y)


class Model(nn.Module):
    def __init__(self, form: Callable[[int], str] | str, has_linear: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        for layer in self.layers:
            layer.has_linear = has_linear
        self.form = form

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        form = self.form if isinstance(self.form, str) else self.form(step)
        x = self.embedding(x)
        hidden, named, cache = [x], {"hidden": x}, Cache()
        nested = ({"all": hidden},)
        losses = []
        for layer in self.layers:
            if form in ("list", "nested"):
                layer(hidden if form == "list" else nested, form)
            elif form == "dict":
                assert layer(named, form=form) is named
            elif form == "in place":
                x = x + layer(x, form)
            elif form == "attribute":
                x = layer(x, form)
                losses.append(layer.loss)
            elif form in ("recomputed", "selective", "saved ahead"):
                x = self.recomputed(layer, x, form)
            else:
                y = layer(x, form, extra=cache)
                x = self.opened(y)
        if form in ("list", "nested"):
            assert len(hidden) == 4
            return sum(each.square().mean() for each in hidden)
        if form == "dict":
            assert named["number"] == 3
            x = named["hidden"]
        assert form != "cache" or len(cache.layers) == 3
        return x.square().mean() + sum(losses)

    def opened(self, y: Any) -> torch.Tensor:
        if isinstance(y, Result):
            return y.hidden
        if isinstance(y, Closed):
            return y.get()
        return y.h[0] if isinstance(y, SimpleNamespace) else y

    def recomputed(self, layer: nn.Module, x: torch.Tensor, form: str) -> torch.Tensor:
        if form == "recomputed":
            return checkpoint.checkpoint(layer, x, use_reentrant=False)
        policy = checkpoint.CheckpointPolicy.MUST_SAVE
        if form == "selective":

            def save_products(_, operation, *args, **kwargs):
                is_product = operation is torch.ops.aten.addmm.default
                return policy if is_product else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

            contexts = partial(checkpoint.create_selective_checkpoint_contexts, save_products)
        else:
            contexts = partial(
                checkpoint.create_selective_checkpoint_contexts, lambda *_, **__: policy
            )
        return checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def usual_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank), step)


def new_sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02)


def trains_alike(
    build: Callable[[], nn.Module],
    all_sizes: Iterable[Sizes],
    loss_of: Loss = usual_loss,
    steps: int = STEPS,
) -> None:
    for sizes in all_sizes:
        loops.trains_alike(
            sizes,
            build,
            lambda *place: [loss_of(*place)],
            unclipped_step,
            steps,
            new_optimizer=new_sgd,
            clip=unclipped,
        )


FORMS = {
    "a unit that begins with `ReLU(inplace=True)`": ["in place"],
    "a list or dict that a unit writes into": ["list", "dict", "nested"],
    "a cache that layers append to": ["cache"],
    "a unit that returns a dataclass or another object": ["dataclass", "namespace", "closed"],
    "a loss that a unit keeps in an attribute": ["attribute"],
    "`checkpoint` around a unit, also selective": ["recomputed", "selective", "saved ahead"],
}  # fmt: skip


def check_forms(all_sizes: Sequence[Sizes]) -> None:
    """Each form comes after a step of tensors, which teaches the engine what it may leave out."""
    forms = [form for each in FORMS.values() for form in each]
    in_turn = [form for each in forms for form in ("", each)]
    trains_alike(partial(Model, in_turn.__getitem__), all_sizes, steps=len(in_turn))
    without_views = partial(Model, in_turn.__getitem__, has_linear=False)
    trains_alike(without_views, all_sizes[:1], steps=len(in_turn))


# ---- what others do around a model


def check_modes_and_transforms(all_sizes: Sequence[Sizes]) -> None:
    """A transform in the very first forward, and modes that see or keep every operation."""

    def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        inputs = (batch(step, rank),), (batch(step, rank + 50),)
        if step == 0:
            value, slope = torch.func.jvp(lambda x: model(x, step), *inputs)
            return value + slope.detach()
        with FlopCounterMode(display=False) as counter:
            loss = usual_loss(model, step, rank)
        assert counter.get_total_flops() == 4 * 2 * 4 * WIDTH * WIDTH
        return loss

    trains_alike(partial(Model, ""), all_sizes, loss_of)


# ---- gradients in a forward, and of a model


class Slopes(Layer):
    """Computes with the gradients of what it computes."""

    ask: Callable[[Callable, torch.Tensor], torch.Tensor]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_leaf:
            x = x.clone().requires_grad_()
        compute = super().compute
        return compute(x) + self.ask(compute, x) + compute(x).detach()


def by_autograd(compute: Callable, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.autograd.grad(compute(x).square().sum(), x, create_graph=True, **kwargs)[0]


SLOPES: dict[str, Callable[[Callable, torch.Tensor], torch.Tensor]] = {
    "autograd.grad": by_autograd,
    "without a graph": lambda compute, x: torch.autograd.grad(
        compute(y := x.detach().requires_grad_()).square().sum(), y
    )[0],
    "recomputed": lambda compute, x: checkpoint.checkpoint(
        partial(by_autograd, compute), x, use_reentrant=False
    ),
    "func.grad": lambda compute, x: torch.func.grad(lambda y: compute(y).square().sum())(x),
    "jacrev": lambda compute, x: torch.func.vmap(torch.func.jacrev(compute))(x).sum(-1),
    "twice": lambda compute, x: by_autograd(partial(by_autograd, compute), x),
}


class Forces(Model):
    """What comes out is made of the gradient of an energy of all layers."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(x, step).sum(), x, create_graph=True)
            return super().forward(force, step)


def slopes_of_the_model(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    with torch.no_grad():
        evaluated = model(batch(step, rank + 7), step).sum()
    slope = torch.func.grad(lambda x: model(x, step).sum())(batch(step, rank))
    return usual_loss(model, step, rank) + slope.square().mean() + 0 * evaluated


def check_slopes(all_sizes: Sequence[Sizes], ways: list[str]) -> None:
    for form, way in [("recomputed", "autograd.grad"), *(("", way) for way in ways)]:

        def build(form: str = form, way: str = way) -> nn.Module:
            model = Model(form)
            for layer in model.layers:
                layer.__class__, layer.ask = Slopes, SLOPES[way]
            return model

        trains_alike(build, all_sizes)
    trains_alike(partial(Forces, ""), all_sizes)
    trains_alike(partial(Model, ""), [(1, 1, 2)], slopes_of_the_model)
    model = Model("")
    sharded = shard(model, model.layers, ShardSizes(2, 2, 2), new_sgd)
    with pytest.raises(ConfigurationError, match="root is called within torch.func's grad"):
        slopes_of_the_model(model, 0, 0)
    sharded.runtime.driver.close()


# ---- what modules keep


def views_of(layer: Layer) -> dict[str, Any]:
    """Attributes by path, as in a message."""
    weight = layer.linear.weight
    return {
        "layers.0.view": weight.t(),
        "layers.0.kept[0]": (weight[:2],),
        "layers.0.kept['a'][1]": {"a": [None, weight.detach()]},
        "layers.0.kept.hidden": Result(weight.data.view(-1)),
        "layers.0.kept.h[0]": SimpleNamespace(h=[layer.gate.data]),
        "layers.0.kept.base": weight.detach().numpy(),
        "layers.0.kept[1]": deque([None, weight.t()]),
        "layers.0.kept.keywords['weight']": partial(functional.linear, weight=weight[:2]),
        "layers.0.other": nn.Parameter(weight.data).requires_grad_(False).data,
    }


def check_views(all_sizes: Sequence[Sizes]) -> None:
    for path in views_of(Layer()):
        for is_buffer in {False, path.endswith("view")}:
            model = Model("")
            name = path.removeprefix("layers.0.").partition("[")[0].partition(".")[0]
            kept = views_of(model.layers[0])[path]
            if is_buffer:
                model.layers[0].register_buffer(name, kept.detach())
            else:
                setattr(model.layers[0], name, kept)
            with pytest.raises(ConfigurationError) as refused:
                shard(model, model.layers, ShardSizes(2, 2, 2), new_sgd)
            assert f"{path} is a view of layers.0." in str(refused.value)
    # What is no view of a parameter, or is the parameter itself.
    model = Model("")
    layer = model.layers[0]
    layer.copied, layer.weights = layer.gate.clone().detach(), [layer.linear.weight]
    shard(model, model.layers, ShardSizes(2, 2, 2), new_sgd).close()
    trains_alike(build_spectral, all_sizes)
    check_views_of_a_forward()


def build_spectral() -> nn.Module:
    """Its hook sets an attribute, a view of the parameter at first, anew in each forward."""
    model = Model("")
    for layer in model.layers:
        nn.utils.spectral_norm(layer.linear).eval()
    return model


class Keeping(Layer):
    """Keeps a view of its weight from the first forward in which it may."""

    keeps = ""

    def forward(self, x: Any, form: str = "", extra: Any = None) -> Any:
        if self.keeps and not hasattr(self, "kept"):
            weight = self.linear.weight
            self.kept = {
                "weight": weight.t() if self.keeps == "tensor" else weight.numpy(force=True)
            }
        return (
            torch.tanh(x @ torch.as_tensor(self.kept["weight"])) if self.keeps else self.compute(x)
        )


def check_views_of_a_forward() -> None:
    for first_step in (0, 2):
        model = Model("")
        for layer in model.layers:
            layer.__class__ = Keeping
        sharded = shard(model, model.layers, ShardSizes(2, 2, 2), new_sgd)
        for step in range(first_step):
            sharded.zero_grad()
            usual_loss(model, step, dist.get_rank()).backward()
            sharded.step()
        for layer in model.layers:
            layer.keeps = "array" if first_step else "tensor"
        with pytest.raises(
            ConfigurationError, match=r"layers.0.kept\['weight'\].* keeps a view of"
        ):
            usual_loss(model, 0, dist.get_rank())
        sharded.runtime.driver.close()


# ---- weights of others, and weights that are written


class Aside(Model):
    """Uses weights of units in whose call it is not."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x, last = self.embedding(x), self.layers[-1]
        if self.form == "tied by hand":
            return functional.linear(super().forward(x, step) * x, last.linear.weight).sum()
        for layer in self.layers if self.form == "by forward" else self.layers[step : step + 1]:
            x = layer.forward(x) if self.form == "by forward" else layer(x)
        return x.square().mean()


def penalised(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of all weights, those of layers too that this step has not called."""
    return usual_loss(model, step, rank) + sum(p.square().sum() for p in model.parameters())


def check_weights_of_others() -> None:
    """Where they are always gathered, and an update is on its way to them when they are used."""

    def build(form: str) -> nn.Module:
        model = Aside(form)
        model.layers.extend(Layer() for _ in range(4))  # more than are rebuilt ahead
        return model

    for form in ("tied by hand", "by forward", "one in turn"):
        loss_of = penalised if form == "one in turn" else usual_loss
        trains_alike(partial(build, form), [(1, 1, 2)], loss_of, steps=6)


def write_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def write_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[-1:] = 0.25


def assign_data(weight: nn.Parameter) -> None:
    weight.data = torch.renorm(weight.data, 2, 0, 0.1)


def write_openly(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


WRITES = [write_data, assign_data, write_numpy, write_openly]


class Writing(Layer):
    """Changes a weight of its own before it computes, as masks and norms of weights do."""

    write: Callable[[nn.Parameter], None]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.linear.weight)
        return super().compute(x)


def check_writes(cases: Iterable[tuple[Sizes, Callable]]) -> None:
    """Refused in the first forward, be it an evaluation, on all ranks: of its own accord where one
    holds what was written, else because it is told."""
    for number, (sizes, write) in enumerate(cases):
        model = Model("")
        schedule = ScheduleConfig(time_limit_s=20.0)
        sharded = shard(model, model.layers, ShardSizes(*sizes), new_sgd, schedule=schedule)
        sharded.zero_grad()
        usual_loss(model, 0, dist.get_rank()).backward()
        sharded.step()
        model.layers[1].__class__, model.layers[1].write = Writing, staticmethod(write)
        with pytest.raises((ConfigurationError, CollectiveFailure)) as found:
            with torch.set_grad_enabled(number % 2 == 0):
                usual_loss(model, 0, dist.get_rank())
            # A rank that owns nothing of it is told.
            usual_loss(model, 0, dist.get_rank()).backward()
            sharded.step()
        lines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(lines, str(found.value))
        told = "layers.1: its parameters were written to in a forward"
        assert any(told in line for line in lines) and not any("\n" in line for line in lines)
        with suppress(ConfigurationError, CollectiveFailure):
            sharded.close()


# ---- what modules ask of their inputs


class Asking(Layer):
    """Attends to itself where it is handed one tensor twice, and reads and leaves notes on it."""

    def forward(self, x: Any, form: str = "", extra: Any = None, other: Any = None) -> Any:
        others = [one for one in (form, other) if isinstance(one, torch.Tensor)]
        y = self.compute(x) * (3.0 if others and all(one is x for one in others) else 1.0)
        x.left = getattr(x, "noted", 0.5) + 1
        return y


class Handing(Model):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            if self.form == "noted":
                x.noted = 2.0
            before = x
            others = {"twice": (x,), "two": (x.clone(), None, x)}.get(str(self.form), ())
            x = layer(x, *others, **({"other": x} if self.form == "by name" else {}))
            x = x * before.left
        return x.square().mean()


def check_inputs(all_sizes: Sequence[Sizes]) -> None:
    for form in ("twice", "by name", "two", "noted"):

        def build(form: str = form) -> nn.Module:
            model = Handing(form)
            for layer in model.layers:
                layer.__class__ = Asking
            return model

        trains_alike(build, all_sizes)


@pytest.mark.habit(*FORMS)
@pytest.mark.habit(
    "`layer.forward(x)`, or a layer's weight that another module uses, in a forward",
    "`weight.data` written or assigned in a forward: masks, norms of weights, values from a batch",
    "a module that asks whether two inputs are one tensor, or for attributes of theirs",
)
@pytest.mark.habit(
    "`torch.autograd.graph.save_on_cpu` around a model, around a unit or within it",
    "`torch.func.jvp` of a model",
    "`torch.autograd.grad`, `torch.func.grad`, `jacrev` in a forward",
    "`torch.func.grad`, `vjp`, `jacrev`, `hessian` of a model",
    "a counter of operations (`FlopCounterMode`)",
    "an attribute or buffer that views a weight, made before `shard` or in a forward",
    "`spectral_norm`, whose hook sets an attribute anew",
)
@pytest.mark.parametrize(
    "ranks, all_sizes", [(2, SIZES), slow_unless(False, 4, SIZES_OF_4)], ids=["2", "4"]
)
def test_what_modules_are_handed_return_and_keep_trains_or_is_refused_by_name(ranks, all_sizes):
    run_ranks(check_all, ranks, all_sizes, ranks == 2)


def check_all(all_sizes: Sequence[Sizes], is_fast: bool) -> None:
    some = all_sizes[:1] if is_fast else all_sizes
    check_forms(some)
    if is_fast:
        check_hooks_of_others()
    check_modes_and_transforms(some)
    check_slopes(some, ["without a graph", "jacrev"] if is_fast else list(SLOPES))
    check_views(some)
    check_inputs(some)
    check_weights_of_others()
    check_writes(zip(SIZES, WRITES) if is_fast else product(all_sizes, WRITES))
