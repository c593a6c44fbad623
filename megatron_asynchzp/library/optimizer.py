# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer of this rank's parts, and guards it against uses that need whole ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_asynchzp.engine.zero.guard import SHARDED_AS
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.fragments import TrainedFragment
from megatron_asynchzp.library.grads import refuse_whole_states, whole_shapes
from megatron_asynchzp.library.params import refuse_copies
from megatron_asynchzp.library.parts import ShardTensor, plain
from megatron_asynchzp.library.states import refuse_optimizer

NewOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer of (name, parameter) pairs, as torch's optimizers take them."""

_HELD = "asynchzp_held"
"""The key of an optimizer's state_dict() for the elements it has: (parameter, start, stop)."""


def guarded_optimizer(
    new_optimizer: NewOptimizer, trained: Sequence[TrainedFragment], device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer of `trained`; it refuses calls that would work on parts alone."""
    named = [(part.name, part.param) for part in trained]
    if not named:  # a frozen model; torch's optimizers refuse an empty list
        named = [("nothing", nn.Parameter(torch.zeros(0, device=device)))]
    with whole_shapes({part.param: part.shape for part in trained}):
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
            "the optimizer has parameters that shard() did not hand over. Make it of the pairs "
            "that its function gets, and another optimizer for parameters outside of the model"
        )
    if trained:
        refuse_optimizer(optimizer)
    attributes = cast("Any", optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigurationError(
            f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its "
            "steps have no hooks. Call super().__init__(params, defaults)"
        )
    attributes._patch_step_function()  # again, as the class may have replaced it
    attributes.add_param_group = _refuse_new_group
    attributes.__reduce_ex__ = refuse_copies
    held = [(part.name, part.held.start, part.held.stop) for part in trained]
    optimizer.register_state_dict_pre_hook(refuse_whole_states)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update({_HELD: held}))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: _refuse_other_parts(state, held))
    return optimizer


def make_states_plain(optimizer: torch.optim.Optimizer) -> None:
    """Make states plain tensors, if a training loop computed them from parameters."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, ShardTensor):
                state[key] = plain(value)


@cache
def watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_other_optimizers)


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step of an optimizer of the model's own parameters, which have no gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := getattr(param, SHARDED_AS, None)) is not None:
                raise ConfigurationError(
                    f"{name}: an optimizer of model.parameters() trains nothing of a sharded "
                    "model; hand shard() a function that makes it, as optimizer=lambda params: "
                    "torch.optim.AdamW(params, lr=1e-3), and step sharded.optimizer"
                )


def _refuse_other_parts(state: Mapping[str, Any], held: list[tuple[str, int, int]]) -> None:
    """Refuse a state of other parts; runs before an optimizer's load_state_dict()."""
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
