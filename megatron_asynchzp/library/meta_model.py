# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fills a model on the meta device module by module; a rank keeps its part of each unit."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.engine.zero.tensors_within import tensors_kept
from megatron_asynchzp.errors import ConfigurationError

Fill = tuple[Callable[[], object], str]
"""A method without arguments, and its name in messages."""
FillOf = tuple[Callable[[nn.Module], object], str]
"""A method that fills the module that it gets, and its name in messages."""


@torch.no_grad()
def materialize(
    model: nn.Module,
    units: Sequence[nn.Module],
    device: torch.device,
    cut: Callable[[nn.Module, Collection[nn.Parameter]], object],
) -> None:
    """Allocate `model` on `device` and let each module's reset_parameters() fill it, in order.

    Tied parameters stay tied. In a model of transformers `_init_weights` fills the modules. `cut`
    gets each unit whose parameters are filled, and the model's shared parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    around = _init_weights_around(model)
    fills = {module: _fill_of(module, name, around.get(module)) for module, name in names.items()}
    order = list(names)
    last = {unit: _completed_at(unit, order) for unit in units}
    made: dict[torch.Tensor, torch.Tensor] = {}
    for index, module in enumerate(order):
        if (fill := fills[module]) is not None:
            unfilled = [own for own, tensor in _own_tensors(module) if tensor.is_meta]
            _allocate(module, device, made)
            _fill(module, names[module], fill, unfilled, device)
        for unit in (unit for unit, end in last.items() if end == index):
            shared = shared_params(model)
            cut(unit, shared)
    for path, tensor in tensors_kept({name: module for module, name in names.items()}):
        if tensor.is_meta:
            raise ConfigurationError(
                f"{path} is on the meta device, and is neither parameter nor buffer: register it "
                "as a buffer that reset_parameters() fills, or build the model on a device"
            )


def shared_params(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Find parameters with several names, and the modules of all names but the first."""
    modules: dict[nn.Parameter, list[nn.Module]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        modules.setdefault(param, []).append(model.get_submodule(name.rpartition(".")[0]))
    return {param: users[1:] for param, users in modules.items() if len(users) > 1}


def _init_weights_around(model: nn.Module) -> dict[nn.Module, FillOf]:
    """Find, by module, the `_init_weights` of the innermost module around it that has one."""
    inits: dict[nn.Module, FillOf] = {}
    for module in model.modules():  # from the outside to the inside
        if callable(init := getattr(module, "_init_weights", None)):
            title = f"_init_weights() of {type(module).__name__}"
            inits.update(dict.fromkeys(module.modules(), (init, title)))
    return inits


def _completed_at(unit: nn.Module, order: Sequence[nn.Module]) -> int:
    """Return the index of the last module that fills a parameter of `unit`, a tied one too."""
    own, parts = set(unit.parameters()), set(unit.modules())
    return max(
        index
        for index, module in enumerate(order)
        if module in parts or not own.isdisjoint(module.parameters(recurse=False))
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = chain(module._parameters.items(), module._buffers.items())
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _fill_of(module: nn.Module, name: str, init_weights: FillOf | None) -> Fill | None:
    """Return the method that fills the module's own tensors, or None if it has none."""
    unfilled = [own for own, tensor in _own_tensors(module) if tensor.is_meta]
    if not unfilled:
        return None
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, method, None)):
            return reset, f"{method}() of {type(module).__name__}"
    if init_weights is not None:
        init, title = init_weights
        return partial(init, module), title
    where = name or "the model"
    raise ConfigurationError(
        f"{where} (a {type(module).__name__}) is on the meta device and cannot fill its "
        f"{unfilled[0]}; give the class a reset_parameters() that fills it, or build the model on "
        "a device"
    )


def _allocate(
    module: nn.Module, device: torch.device, made: dict[torch.Tensor, torch.Tensor]
) -> None:
    for tensors in (module._parameters, module._buffers):
        slots: dict[str, Any] = dict(tensors)
        for name, tensor in slots.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:
                value = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    for key, attribute in vars(tensor).items():
                        setattr(value, key, attribute)
                made[tensor] = value
            slots[name] = made[tensor]
        tensors.update(slots)


def _fill(
    module: nn.Module, name: str, fill: Fill, own: Sequence[str], device: torch.device
) -> None:
    """Let `fill` set the tensors `own` of `module`; refuse a tensor that it does not fill.

    Floats are NaN before. Other dtypes have no such value. For them, and if a NaN remains, `fill`
    runs again with the same random numbers over other values: those that then differ are unfilled.
    """
    generators = _generator_states(device)
    first = _filled(module, fill, own, device, is_again=False)
    if all(_can_be_nan(value) and not value.isnan().any() for value in first.values()):
        return
    first = {key: value.clone() for key, value in first.items()}
    _restore_generators(generators, device)
    for key, value in _filled(module, fill, own, device, is_again=True).items():
        before = first[key]
        if _can_be_nan(value):
            is_unfilled = bool((before.isnan() & ~value.isnan()).any())
        else:
            bits = [each.reshape(-1).view(torch.uint8) for each in (before, value)]
            is_unfilled = not torch.equal(*bits)
        if is_unfilled:
            raise ConfigurationError(
                f"{name}{'.' if name else ''}{key}: the {fill[1]} leaves it without values; "
                "fill it there, or build the model on a device"
            )


def _filled(
    module: nn.Module, fill: Fill, own: Sequence[str], device: torch.device, is_again: bool
) -> dict[str, torch.Tensor]:
    """Set the tensors `own` of `module` to a mark (another if `is_again`), fill and return them."""
    for key in own:
        tensor = getattr(module, key).data
        usual, mark = (0, torch.nan) if _can_be_nan(tensor) else (43, 84)
        if tensor.dtype == torch.bool:
            usual, mark = True, False
        elif tensor.is_complex():
            mark = complex("nan+nanj")
        tensor.fill_(usual if is_again else mark)
    fill[0]()
    for key, buffer in module._buffers.items():
        if key in own and buffer is not None:
            module._buffers[key] = buffer.to(device)  # one that was made anew
    found = {key: getattr(module, key, None) for key in own}
    return {key: tensor.data for key, tensor in found.items() if tensor is not None}


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def _restore_generators(states: Sequence[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
