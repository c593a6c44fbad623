# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Casts the inputs of modules to the dtype in which they compute."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence


def cast_inputs_of(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast all floating-point inputs of `modules` to `dtype`, however deep, as FSDP2 does."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    for module in modules:
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `fn` to the tensors in `value`.

    A container without a change stays the same object, so a module can write to it; another one is
    copied and keeps its class.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        data = fn(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, (list, tuple, set)):
        items: list[Any] = list(value)
        mapped = [map_tensors(fn, item) for item in items]
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return value
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*mapped) if is_named else type(value)(mapped)
    set_item: Any = dict.__setitem__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        held = {name: getattr(value, name) for name in names}
        is_frozen = type(value).__dataclass_params__.frozen  # pyright: ignore
        set_item = object.__setattr__ if is_frozen else setattr
    elif isinstance(value, dict):
        held = value
    else:
        return value
    changed = {key: map_tensors(fn, item) for key, item in held.items()}
    changed = {key: item for key, item in changed.items() if item is not held[key]}
    result = copy.copy(value) if changed else value
    for key, item in changed.items():
        set_item(result, key, item)
    return result
