# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a model on the meta device gets its values: module by module, and of each unit a rank
keeps its part as soon as the unit is complete."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.errors import ConfigurationError

Fill = Callable[[], object]


def is_meta(model: nn.Module) -> bool:
    """Whether the parameters of `model`, which are on one device, are on the meta device."""
    return any(param.is_meta for param in model.parameters())


@torch.no_grad()
def materialize(
    model: nn.Module,
    units: Sequence[nn.Module],
    device: torch.device,
    complete: Callable[[nn.Module], object],
) -> None:
    """Allocate the parameters and buffers of `model` on `device`, and let each module's own
    reset_parameters() fill them, in the order of model.modules(). Tied parameters stay tied.

    complete: called with each of `units` when all modules that have its parameters are filled.
    Raises ConfigurationError, by name, for a module that cannot fill its own tensors.
    """
    names = {module: name for name, module in model.named_modules()}
    fills = {module: _fill_of(module, name) for module, name in names.items()}
    order = list(names)
    last = {unit: _completed_at(unit, order) for unit in units}
    made: dict[torch.Tensor, torch.Tensor] = {}
    for index, module in enumerate(order):
        if (fill := fills[module]) is not None:
            _allocate(module, device, made)
            fill()
            _refuse_unfilled(module, names[module])
        for unit in (unit for unit, end in last.items() if end == index):
            complete(unit)


def _completed_at(unit: nn.Module, order: Sequence[nn.Module]) -> int:
    """The index of the last module that fills something of `unit`, which may be a module elsewhere
    that has a tied parameter."""
    own, parts = set(unit.parameters()), set(unit.modules())
    return max(
        index
        for index, module in enumerate(order)
        if module in parts or not own.isdisjoint(module.parameters(recurse=False))
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = chain(module._parameters.items(), module._buffers.items())
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _fill_of(module: nn.Module, name: str) -> Fill | None:
    """What gives the module's own tensors their values; None where it has none."""
    unfilled = [own for own, tensor in _own_tensors(module) if tensor.is_meta]
    if not unfilled:
        return None
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(found := getattr(module, method, None)):
            return found
    where = name or "the model"
    raise ConfigurationError(
        f"{where} (a {type(module).__name__}) is on the meta device, and nothing says which values "
        f"its {unfilled[0]} has; give the class a reset_parameters() that fills it, or build the "
        "model on a device"
    )


def _allocate(
    module: nn.Module, device: torch.device, made: dict[torch.Tensor, torch.Tensor]
) -> None:
    """Values that nobody fills are NaN."""
    for tensors in (module._parameters, module._buffers):
        slots: dict[str, Any] = dict(tensors)
        for name, tensor in slots.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:
                value = torch.empty_like(tensor, device=device)
                if value.is_floating_point():
                    value.fill_(float("nan"))
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    for key, attribute in vars(tensor).items():
                        setattr(value, key, attribute)
                made[tensor] = value
            slots[name] = made[tensor]
        tensors.update(slots)


def _refuse_unfilled(module: nn.Module, name: str) -> None:
    for own, tensor in _own_tensors(module):
        if tensor.is_floating_point() and tensor.isnan().any():
            where = f"{name}." if name else ""
            raise ConfigurationError(
                f"{where}{own}: the reset_parameters() of {type(module).__name__} leaves it "
                "without values; fill it there, or build the model on a device"
            )
