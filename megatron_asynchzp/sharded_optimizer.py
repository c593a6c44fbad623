# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a sharded model's optimizer is besides torch's: made of this rank's parts, and guarded
against uses that know whole parameters only.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharded_fragments import TrainedFragment
from megatron_asynchzp.sharded_params import refuse_copies
from megatron_asynchzp.zero.guard import SHARDED_AS

NewOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer of (name, parameter) pairs, as torch's optimizers take them."""

_WHOLE_STATES = "torch.distributed.checkpoint.state_dict"
_HELD = "asynchzp_held"
"""Where an optimizer's state_dict() says of which elements it is: (parameter, start, stop)."""


def guarded_optimizer(
    new_optimizer: NewOptimizer, trained: Sequence[TrainedFragment], device: torch.device
) -> torch.optim.Optimizer:
    """What `new_optimizer` makes of the parameters of `trained`. Raises ConfigurationError for what
    is no optimizer of them. Afterwards calls are refused that would do less than they say."""
    named = [(part.name, part.param) for part in trained]
    if not named:  # a reference or a teacher, which torch's optimizers refuse
        named = [("nothing", nn.Parameter(torch.zeros(0, device=device)))]
    optimizer = new_optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer returned a {type(optimizer).__name__}; it is to return an optimizer of "
            "torch, as lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS calls the model within its step, with this rank's parameters alone; take an "
            "optimizer that needs gradients only, as torch.optim.AdamW"
        )
    known = {param for _, param in named}
    if any(param not in known for group in optimizer.param_groups for param in group["params"]):
        raise ConfigurationError(
            "the optimizer has parameters that shard() did not hand over; make it of the pairs "
            "that its function is called with, and another one for what is not in the model"
        )
    attributes = cast("Any", optimizer)
    attributes.add_param_group = _refuse_new_group
    attributes.__reduce_ex__ = refuse_copies
    held = [(part.name, part.held.start, part.held.stop) for part in trained]
    optimizer.register_state_dict_pre_hook(_refuse_whole_states)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update({_HELD: held}))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: _refuse_other_parts(state, held))
    return optimizer


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer, trained: Sequence[TrainedFragment]) -> None:
    """Torch's optimizers make their state in the first step: take one of no effect. Nothing where
    there is a state."""
    if optimizer.state or not trained:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    before: list[tuple[type, torch.Tensor | None]] = []
    for part in trained:
        param: Any = part.param
        kind, param.__class__ = type(param), nn.Parameter
        before.append((kind, param.grad))
        param.grad = torch.zeros_like(part.grad)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for part, (kind, grad) in zip(trained, before, strict=True):
        param = part.param
        param.grad, param.__class__ = grad, kind
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)()


@cache
def watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_other_optimizers)


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Before a step of any optimizer of the process: its parameters are to have gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := getattr(param, SHARDED_AS, None)) is not None:
                raise ConfigurationError(
                    f"{name}: an optimizer of model.parameters() trains nothing of a sharded "
                    "model; hand shard() a function that makes it, as optimizer=lambda params: "
                    "torch.optim.AdamW(params, lr=1e-3), and step sharded.optimizer"
                )


def _refuse_whole_states(*_: object) -> None:
    """Before an optimizer's state_dict(): torch's get_state_dict looks for whole parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _WHOLE_STATES:
        frame = frame.f_back
    if frame is not None:
        raise ConfigurationError(
            "the optimizer of a sharded model has this rank's parts, which torch's functions for "
            "state dicts do not know; sharded.state_dict() has model and optimizer for "
            "torch.distributed.checkpoint"
        )


def _refuse_other_parts(state: Mapping[str, Any], held: list[tuple[str, int, int]]) -> None:
    """Before an optimizer's load_state_dict()."""
    found = [tuple(part) for part in state.get(_HELD, ())]
    if found != held:
        whose = "of another rank or other sizes" if found else "of a model that is not sharded"
        raise ConfigurationError(
            f"this state of the optimizer is {whose}: each rank has its own part; save "
            "sharded.state_dict() with torch.distributed.checkpoint, which loads into any sizes"
        )


def _refuse_new_group(_group: object) -> None:
    raise ConfigurationError(
        "add_param_group: the optimizer has the parameters that the model had when it was sharded; "
        "make all groups in the function that shard() gets"
    )


class AwaitedParam(nn.Parameter):
    """The class, for now, of an optimizer's parameter whose gradient is on its way: who reads it
    (a GradScaler, torch's clip_grad_norm_) waits for it."""

    await_grads: Callable[[bool], None]

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        reader = sys._getframe(1).f_globals.get("__name__")
        if reader == _WHOLE_STATES:
            _refuse_whole_states()
        function = sys._getframe(1).f_code.co_name
        if reader == "torch.nn.utils.clip_grad" and function != "clip_grad_value_":
            raise ConfigurationError(
                "torch's gradient clipping sees this rank's part alone; call "
                "sharded.clip_grad_norm_()"
            )
        # From then on `self` is a plain parameter. What else reads may do so on one rank alone.
        self.await_grads(reader == "torch.amp.grad_scaler")
        return self.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            raise ConfigurationError(
                "the gradients of a sharded model are collected elsewhere, and add up; forget them "
                "with zero_grad()"
            )
        self.await_grads(False)
        self.grad = value
