# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a parameter of a sharded model answers while nothing computes with it."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharded_state import ShardedState
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.guard import GRAD, SHARDED_AS, Use
from megatron_asynchzp.zero.unit import HZPUnit

_COPIES = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__}
NO_COPIES = (
    "a sharded model cannot be copied or pickled; save sharded.state_dict() with "
    "torch.distributed.checkpoint, or take the values of sharded.full_params()"
)


def _refuse_copies(_protocol: int) -> Any:
    raise ConfigurationError(NO_COPIES)


def _convert(
    model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """In the place of `model._apply`, which torch's conversions (to, float, cuda, ...) call."""
    for name, param in model.named_parameters():
        sample = torch.empty(0, dtype=param.dtype, device=param.device)
        converted = fn(sample)
        if (converted.dtype, converted.device) != (sample.dtype, sample.device):
            raise ConfigurationError(
                f"{name} is sharded as {sample.dtype} on {sample.device}, which cannot be changed "
                "any more; convert or move the model before shard()"
            )
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else fn(buffer)
    return model


class _NoDDP:
    """What DistributedDataParallel is to leave out of a sharded model: it looks, and is refused."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigurationError(
            "a sharded model reduces its gradients itself; leave out DistributedDataParallel"
        )


class ShardedParams:
    """The parameters of `model`, whose values are in shards.

    While nothing computes with them they answer (see zero.guard):

        state_dict()          this rank's part, for torch.distributed.checkpoint
        load_state_dict()     takes this rank's part of the whole values
        repr()                says so

    Everything else is refused by name; where parameters are gathered anyway, what only reads them
    waits for the update to reach them, and is done.
    """

    def __init__(self, model: nn.Module, runtime: HZPRuntime):
        self._model, self._runtime = model, runtime
        self._places = {
            param: (unit, index)
            for unit in runtime.units
            for index, param in enumerate(unit.params)
        }
        self._versions = {param: param._version for param in self._places}

    def bind(self, zero_grad: Callable[[], None]) -> None:
        """From now on what people do out of habit with the model is right, or refused.

        zero_grad: what the model's own is to do.
        """
        self._runtime.guard(self.answer)
        for param in self._places:
            setattr(param, SHARDED_AS, self.name_of(param))
        model: Any = self._model
        model.zero_grad = lambda set_to_none=True: zero_grad()
        model._apply = partial(_convert, model)
        model.__reduce_ex__ = _refuse_copies
        model._ddp_params_and_buffers_to_ignore = _NoDDP()

    def name_of(self, param: nn.Parameter) -> str:
        """Of a parameter of the model."""
        unit, index = self._places[param]
        return unit.param_names[index]

    def answer(self, use: Use, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As zero.guard asks for it."""
        leaves = tree_leaves((args, kwargs))
        param = next(x for x in leaves if isinstance(x, nn.Parameter) and x in self._places)
        unit, index = self._places[param]
        name = self.name_of(param)
        if use == GRAD:
            raise ConfigurationError(
                f"{name}: the gradients of a sharded model are in shards; clip them with "
                "sharded.clip_grad_norm_(), and step sharded.optimizer, not one of your own"
            )
        if use in _COPIES:
            raise ConfigurationError(f"{name}: {NO_COPIES}")
        if use is torch.Tensor.__repr__:
            return f"Parameter {name} of shape {tuple(param.shape)}, in shards"
        if use is torch.Tensor.copy_ and args[0] is param:
            self._runtime.settle()
            self._load(unit, index, args[1])
            return param
        if unit.is_always_unsharded:
            self._runtime.settle()
            return use(*args, **kwargs)
        if use is torch.Tensor.detach:
            self._runtime.settle()
            return ShardedState(param.shape, *unit.model_param.held_of(index))
        raise ConfigurationError(
            f"{name} is in shards, and not gathered here: call a module that contains it "
            "(model(x), not model.forward(x)), or name the method that uses it to "
            "sharded.register_forward_method(); sharded.full_params() has whole values"
        )

    def load(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Take this rank's part of `values`, the whole of a parameter of the model, while nothing
        is in flight."""
        self._load(*self._places[param], values)

    def _load(self, unit: HZPUnit, index: int, values: torch.Tensor) -> None:
        """Take this rank's part of `values`, which is whole, or its part already."""
        held, own = unit.model_param.held_of(index)
        is_part = isinstance(values, ShardedState)
        part = values.values if is_part else values.detach().reshape(-1)[held.start : held.stop]
        part = part.to(own.device)
        if unit.is_trained:
            trained, main = unit.main_param.held_of(index)
            if trained.numel:
                inside = trained.within(held)
                main.copy_(part[inside.start : inside.stop])
        own.copy_(part)
        self._runtime.gathers.note_written()

    # ---- changes behind our back

    def refuse_changes(self) -> None:
        """Raise ConfigurationError for a parameter that is not what it was when it was sharded."""
        for name, param in self._model.named_parameters():
            if param not in self._places:
                raise ConfigurationError(
                    f"{name} was added or replaced after the model was sharded, and would not be "
                    "trained; build the model whole, then shard it"
                )
        self.refuse_writes()
        for param, (unit, _) in self._places.items():
            if param.requires_grad is not unit.is_trained:
                before = "trained" if unit.is_trained else "not trained"
                raise ConfigurationError(
                    f"{self.name_of(param)}: requires_grad is {param.requires_grad}, but it was "
                    f"{before} when the model was sharded; set requires_grad before, and build "
                    "the sharded model again to change it"
                )

    def refuse_writes(self) -> None:
        """Raise ConfigurationError for a parameter that somebody has written to."""
        for param, version in self._versions.items():
            if param._version != version:
                raise ConfigurationError(
                    f"{self.name_of(param)} was written to, which is lost where it is in shards; "
                    "change values before the model is sharded, or with model.load_state_dict() "
                    "between two steps"
                )
