# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Saved-tensor hooks that a program has of its own, in twelve places: they get the tensors that
torch gives them without the engine, less the views of parameters, and all numbers stay the same,
bit for bit."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from threading import Thread

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_asynchzp import ShardSizes, shard

WIDTH = 8


class Copies:
    """Hooks that copy what they get, as those that offload do, and note it.

    passes_over: what is left out of the notes; is_open: whether hooks have begun and not ended.
    """

    def __init__(self, passes_over: Callable[[torch.Tensor], bool]):
        self.passes_over = passes_over
        self.got: list[tuple[tuple[int, ...], bytes]] = []
        self.is_open = self.is_to_fail = False

    def hooks(self, factor: int = 1) -> saved_tensors_hooks:
        """factor: a power of two; hooks that get what others have packed give other values."""
        pack = partial(self.pack, factor=factor)
        return saved_tensors_hooks(pack, lambda copy: copy / factor)

    def pack(self, tensor: torch.Tensor, factor: int) -> torch.Tensor:
        if not self.passes_over(tensor):
            self.got.append((tuple(tensor.shape), tensor.detach().numpy().tobytes()))
        return tensor.detach() * factor

    def begin(self) -> None:
        """As Transformer Engine does it."""
        if not self.is_open:
            self.is_open = True
            pack = partial(self.pack, factor=1)
            torch._C._autograd._push_saved_tensors_default_hooks(pack, lambda copy: copy)

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            torch._C._autograd._pop_saved_tensors_default_hooks()


class Layer(nn.Module):
    """Saves only parameters themselves in the first half, views of them in the second."""

    def __init__(self, has_linear: bool):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH) if has_linear else None

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) * self.gate)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) if self.linear else torch.tanh(x) * self.gate

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def forward(self, x: torch.Tensor, way: str, copies: Copies | None) -> torch.Tensor:
        return x + (self.both(x) if copies is None else WITHIN[way](self, x, copies))


class Model(nn.Module):
    def __init__(self, has_linear: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(has_linear) for _ in range(3))

    def forward(self, x: torch.Tensor, way: str, copies: Copies | None) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            of_unit = copies.hooks() if copies and way == "around units" else nullcontext()
            with of_unit:
                x = layer(x, way, copies)
        return x.square().mean()


def plainly(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    return layer.both(x)


def within(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    with copies.hooks():
        y = layer.both(x)
    return layer.second(y)


def nested(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    with copies.hooks(2):
        y = layer.first(x)
        with copies.hooks(4):
            y = layer.both(y)
        return layer.both(y)


def ends_early(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    y = layer.first(x)
    copies.end()
    return layer.both(y)


def begins_late(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    y = layer.first(x)
    copies.begin()
    return layer.both(y)


def fails_once(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    with copies.hooks():
        y = layer.both(x)
        if copies.is_to_fail:
            copies.is_to_fail = False
            raise ValueError("the first try")
    return layer.both(y)


def recomputed(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    return checkpoint(partial(within, layer, copies=copies), x, use_reentrant=False)


def recomputed_with_views(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    keep_views = partial(create_selective_checkpoint_contexts, [torch.ops.aten.t.default])
    compute = partial(within, layer, copies=copies)
    return checkpoint(compute, x, use_reentrant=False, context_fn=keep_views)


def beside_a_thread(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    other = nn.Linear(WIDTH, WIDTH)
    nn.init.eye_(other.weight)

    def compute() -> None:
        with copies.hooks(2):
            other(torch.ones(1, WIDTH)).square().sum().backward()

    with copies.hooks():
        y = layer.first(x)
        thread = Thread(target=compute)
        thread.start()
        thread.join()
        y = layer.second(y)
    assert other.weight.grad is not None
    return layer.both(y) + other.weight.grad.sum()


def to_the_host(layer: Layer, x: torch.Tensor, copies: Copies) -> torch.Tensor:
    with save_on_cpu():
        return layer.both(x)


# How hooks lie to a unit, and what a layer then does.
WITHIN: dict[str, Callable[[Layer, torch.Tensor, Copies], torch.Tensor]] = {
    "around the model": plainly,
    "around units": plainly,
    "within": within,
    "nested": nested,
    "around and within": within,
    "end in the first unit": ends_early,
    "end after the last unit": begins_late,
    "an error between hooks": fails_once,
    "within a checkpoint": recomputed,
    "within a selective checkpoint": recomputed_with_views,
    "beside another thread's": beside_a_thread,
    "save_on_cpu": to_the_host,
}


def loss_of(model: nn.Module, way: str, copies: Copies | None) -> torch.Tensor:
    x = torch.arange(2.0 * WIDTH).view(2, WIDTH).cos()
    if copies is None:
        return model(x, way, None)
    copies.is_to_fail = way == "an error between hooks"
    if copies.is_to_fail:
        with suppress(ValueError):
            model(x, way, copies)
    if way == "end in the first unit":
        copies.begin()
    with copies.hooks() if way.startswith("around") and "units" not in way else nullcontext():
        loss = model(x, way, copies)
        loss = loss + loss.square()
    copies.end()
    return loss


def new_sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125)


def train(model: nn.Module, copies: Copies, step, zero_grad) -> dict[str, tuple]:
    """A step of each way after one without hooks; what is packed, and the loss that follows."""
    found = {}
    for way in WITHIN:
        losses = []
        for hooks in (None, copies):
            zero_grad()
            loss = loss_of(model, way, hooks)
            loss.backward()
            step()
            losses.append(loss.item())
        found[way] = losses, copies.got
        copies.got = []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    return found


def check_hooks_of_others() -> None:
    """On 2 ranks: every way, with and without views of parameters, parameters in shards or not."""
    for has_linear, sizes in product((True, False), ((2, 2, 2), (1, 1, 2))):
        model = Model(has_linear)
        whole = {param.untyped_storage().data_ptr() for param in model.parameters()}
        copies = Copies(lambda tensor, own=whole: tensor.untyped_storage().data_ptr() in own)
        optimizer = new_sgd(model.parameters())
        expected = train(model, copies, optimizer.step, optimizer.zero_grad)
        assert all(got for way, (_, got) in expected.items() if way != "save_on_cpu")

        copies, model = Copies(lambda tensor: False), Model(has_linear)
        with shard(model, model.layers, ShardSizes(*sizes), new_sgd) as sharded:
            # The same batch on both ranks: halves of sums of two equal gradients are exact.
            found = train(model, copies, sharded.step, sharded.zero_grad)
        for way, (losses, got) in expected.items():
            case = way, has_linear, sizes
            assert [shape for shape, _ in found[way][1]] == [shape for shape, _ in got], case
            assert found[way] == (losses, got), case
