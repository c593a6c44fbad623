# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where the engine touches a model: the module and autograd hooks that ask the runtime.
Must not know buffers or collectives.
"""

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_asynchzp.zero.unit import HZPUnit


class UnitEvents(Protocol):
    """What happens to the units of a module, in the order of one micro-batch."""

    def before_forward(self, units: list[HZPUnit]) -> None: ...

    def after_forward(self, units: list[HZPUnit]) -> None: ...

    def before_backward(self, units: list[HZPUnit]) -> None: ...

    def after_backward(self, units: list[HZPUnit]) -> None: ...

    def grad_ready(self, unit: HZPUnit, index: int) -> None: ...


class _AfterBackward(torch.autograd.Function):
    """Identity on a module's inputs whose backward runs when the module's backward is done.

    It is the oldest node of the module's graph and autograd runs the youngest ready node first
    (AccumulateGrad before all), so the gradients of the module's parameters exist by then.
    """

    @staticmethod
    def forward(ctx: Any, events: UnitEvents, units: list[HZPUnit], *inputs: torch.Tensor):
        ctx.events, ctx.units = events, units
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        ctx.events.after_backward(ctx.units)
        return (None, None, *grads)


def _attach_after_backward(events: UnitEvents, units: list[HZPUnit], args: tuple, kwargs: dict):
    """Pass the tensors among the inputs that carry a gradient through _AfterBackward.

    A parameter among them (a tied weight) is left alone: what comes out would be a view of it
    that the caller's frame keeps for longer than the unit is gathered.
    """
    leaves, spec = tree_flatten((args, kwargs))
    where = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        and leaf.requires_grad
        and not isinstance(leaf, nn.Parameter)
    ]
    if not where:
        return args, kwargs
    passed = _AfterBackward.apply(events, units, *(leaves[i] for i in where))
    for i, tensor in zip(where, passed, strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, spec)


def _attach_before_backward(events: UnitEvents, units: list[HZPUnit], output: Any) -> None:
    """Run `before_backward` as soon as a gradient reaches one of the outputs."""
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda grad: events.before_backward(units))


def attach_unit_hooks(
    module: nn.Module, units: list[HZPUnit], events: UnitEvents
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook `module`, whose calls need the parameters of `units`. Returns the handles."""

    def pre_forward(_module: nn.Module, args: tuple, kwargs: dict):
        events.before_forward(units)
        if torch.is_grad_enabled():
            args, kwargs = _attach_after_backward(events, units, args, kwargs)
        return args, kwargs

    def post_forward(_module: nn.Module, _args: tuple, output: Any):
        events.after_forward(units)
        if torch.is_grad_enabled():
            _attach_before_backward(events, units, output)

    return [
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True),
        # always_call: an exception in the forward must not leave saved-tensor hooks behind.
        module.register_forward_hook(post_forward, always_call=True),
    ]


def attach_grad_hooks(unit: HZPUnit, events: UnitEvents) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook the trained parameters of `unit`: each gradient is taken as soon as it is complete."""

    def hook_of(index: int):
        return lambda _param: events.grad_ready(unit, index)

    return [
        param.register_post_accumulate_grad_hook(hook_of(index))
        for index, param in enumerate(unit.params)
        if param.requires_grad
    ]
