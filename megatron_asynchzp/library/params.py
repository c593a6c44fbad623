# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Answers, or refuses, uses of a sharded model's parameters outside of computation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.guard import DATA, GRAD, NO_GRAPHS, SET_GRAD, SHARDED_AS, Use
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.library.inference import outside_inference
from megatron_asynchzp.library.state import ShardedState

NO_COPIES = (
    "a sharded model cannot be copied or pickled; save sharded.state_dict() with "
    "torch.distributed.checkpoint, or take the values of sharded.full_params()"
)
_NO_GRADS = (
    "gradients with respect to parameters in shards come from loss.backward() alone, for "
    "sharded.optimizer; with sizes.param 1 torch.autograd.grad has them"
)
_IN_SHARDS = "the gradients of a sharded model are in shards;"
_REFUSED: dict[Use, str] = {
    SET_GRAD: f"{_IN_SHARDS} forget them all with zero_grad(), and set those of "
    "sharded.optimizer's parameters",
    GRAD: f"{_IN_SHARDS} clip them with sharded.clip_grad_norm_(), and step sharded.optimizer, not "
    "one of your own",
    **dict.fromkeys((torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__), NO_COPIES),
    **dict.fromkeys(
        (torch.autograd.grad, torch.Tensor.backward, torch.autograd.backward), _NO_GRADS
    ),
}


def refuse_copies(_protocol: int) -> Any:
    raise ConfigurationError(NO_COPIES)


def _convert(
    model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Replace `model._apply`, which torch's conversions (to, float, cuda, ...) call."""
    for name, param in model.named_parameters():
        sample = torch.empty(0, dtype=param.dtype, device=param.device)
        converted = fn(sample)
        if (converted.dtype, converted.device) != (sample.dtype, sample.device):
            raise ConfigurationError(
                f"{name} is sharded as {sample.dtype} on {sample.device}, and cannot change any "
                "more; convert or move the model before shard()"
            )
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else fn(buffer)
    return model


class _NoDDP:
    """Refuses DistributedDataParallel, which reads this list of names to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigurationError(
            "a sharded model reduces its gradients itself; leave out DistributedDataParallel. With "
            "accelerate, prepare() the optimizer and the data without the model; in place of a "
            "Trainer, which always wraps it, write the loop (docs/library.md has one)"
        )


class ShardedParams:
    """The parameters of `model`, whose values are in shards.

    While nothing computes with them they answer (see zero.guard):

        state_dict()          this rank's part, for torch.distributed.checkpoint
        load_state_dict()     takes this rank's part of the whole values
        repr()                says so

    Other uses are refused by name. Gathered parameters can be read, after the update reaches them.
    """

    def __init__(self, model: nn.Module, runtime: HZPRuntime):
        self._model = model
        self._runtime = runtime
        self._places = {
            param: (unit, index)
            for unit in runtime.units
            for index, param in enumerate(unit.params)
        }

    def bind(
        self, zero_grad: Callable[[bool], None], no_sync: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Make the model's own methods (zero_grad, no_sync, conversions) right, or refuse them."""
        for param in self._places:
            setattr(param, SHARDED_AS, self.name_of(param))
        model: Any = self._model
        model.zero_grad = lambda set_to_none=True: zero_grad(set_to_none)
        model.no_sync = no_sync
        for module in model.modules():
            module._apply = partial(_convert, module)
        model.__reduce_ex__ = refuse_copies
        model._ddp_params_and_buffers_to_ignore = _NoDDP()
        self._runtime.guard(self.answer)

    def name_of(self, param: nn.Parameter) -> str:
        """Return the name of a parameter of the model."""
        unit, index = self._places[param]
        return unit.param_names[index]

    def answer(self, use: Use, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `use`, as zero.guard asks for it."""
        leaves = tree_leaves((args, kwargs))
        param = next(x for x in leaves if isinstance(x, nn.Parameter) and x in self._places)
        unit, index = self._places[param]
        name = self.name_of(param)
        if use is torch.Tensor.is_contiguous:
            return True
        if use is torch.Tensor.register_post_accumulate_grad_hook:
            handle = use(*args, **kwargs)
            self._runtime.grad_hooks.move_to_end(param)
            return handle
        if (refusal := _REFUSED.get(use)) is not None:
            raise ConfigurationError(f"{name}: {refusal}")
        if use in (torch.Tensor.__repr__, torch.Tensor.__format__) and not unit.is_always_unsharded:
            return f"Parameter {name} of shape {tuple(param.shape)}, in shards"
        self._runtime.check_awake()
        if use is torch.Tensor.copy_ and args[0] is param:
            self._runtime.check_usable()
            self._runtime.settle()
            self.load(param, args[1])
            return param
        if use in DATA:
            raise ConfigurationError(
                f"{name}: what is written to param.data is lost where it is in shards; read "
                "sharded.full_params(), and change values with model.load_state_dict()"
            )
        if unit.is_always_unsharded:
            if self._runtime.driver.device.is_capturing():
                raise ConfigurationError(
                    f"{name} is used while a CUDA graph is captured: {NO_GRAPHS}"
                )
            self._runtime.settle()
            return use(*args, **kwargs)
        if use is torch.Tensor.detach:
            self._runtime.settle()
            return ShardedState(param.shape, *unit.model_param.elements_of(index))
        raise ConfigurationError(
            f"{name} is in shards, and not gathered here: call a module that contains it "
            "(model(x), not model.forward(x)), or name the method that uses it to "
            "sharded.register_forward_method(); sharded.full_params() has whole values, each until "
            "the next is taken; parametrize before shard(), and leave out FSDP"
        )

    @outside_inference()
    def load(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Load this rank's part of `values`, whole or already this part; nothing is in flight."""
        unit, index = self._places[param]
        held, own = unit.model_param.elements_of(index)
        is_part = isinstance(values, ShardedState)
        part = values.values if is_part else values.detach().reshape(-1)[held.start : held.stop]
        part = part.to(own.device)
        # If other code wrote to main_param, its next use is still refused. On the host none can.
        sent = unit.sent_record
        is_as_sent = unit.is_trained and (unit.is_main_param_away or not sent.was_written())
        if unit.is_trained:
            trained, main = unit.main_param.elements_of(index)
            if trained.numel:
                inside = trained.within(held)
                main.copy_(part[inside.start : inside.stop])
        own.copy_(part)
        if is_as_sent:
            sent.note_sent()
            sent.note_expected(is_as_sent=True)
        unit.marks.note_rewritten()
        self._runtime.gathers.note_written()

    # ---- changes behind our back

    def refuse_changes(self) -> None:
        """Refuse a parameter that was added, removed, written to or frozen after `shard`."""
        raise_first(chain(self._moved(), self._written(), self._frozen()))

    def refuse_writes(self) -> None:
        """Refuse a parameter that other code wrote to."""
        raise_first(self._written())

    def _moved(self) -> Iterator[str]:
        present = set[nn.Parameter]()
        for name, param in self._model.named_parameters():
            present.add(param)
            if param not in self._places:
                yield (
                    f"{name} was added or replaced after the model was sharded, and would not be "
                    "trained; build and parametrize the model, then shard it, without FSDP"
                )
        for param in self._places if len(present) < len(self._places) else ():
            if param not in present:
                yield (
                    f"{self.name_of(param)} was removed from the model, or tied to another one, "
                    "after it was sharded; build the model as it is to be trained, then shard it"
                )

    def _written(self) -> Iterator[str]:
        for param, (unit, index) in self._places.items():
            if param._version != unit.sent_record.versions[index]:
                yield (
                    f"{self.name_of(param)} was written to, which is lost where it is in shards; "
                    "change values before the model is sharded, or with model.load_state_dict() "
                    "between two steps"
                )

    def _frozen(self) -> Iterator[str]:
        for param, (unit, _) in self._places.items():
            if param.requires_grad is not unit.is_trained:
                before = "trained" if unit.is_trained else "not trained"
                yield (
                    f"{self.name_of(param)}: requires_grad is {param.requires_grad}, but it was "
                    f"{before} when the model was sharded; set requires_grad before, and build "
                    "the sharded model again to change it"
                )
