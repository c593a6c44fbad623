# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the search for tensors within values of any form."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_is_leaf

_OPAQUE = (nn.Module, type, str, bytes, int, float, torch.dtype, torch.device, torch.Size)
_MEMBERS = {np.ndarray: ("base",), partial: ("args", "keywords")}  # they have no __slots__
_Found = Iterator[tuple[str, torch.Tensor]]


def tensors_within(value: Any, name: str = "") -> _Found:
    """Yield the tensors in `value`, however nested but not in modules, with paths from `name`."""
    yield from _within(value, name, 6, set())  # six objects deep


def _within(value: Any, name: str, depth: int, seen: set[int]) -> _Found:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and value is not None and not isinstance(value, _OPAQUE) and id(value) not in seen:
        seen.add(id(value))
        for key, part in _parts_of(value):
            yield from _within(part, name + key, depth - 1, seen)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[Any, Any]", value).items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(cast("list[Any]", value)):
            yield f"[{index}]", part
    elif not tree_is_leaf(value):  # a class that torch was told of
        for path, part in tree_flatten_with_path(value)[0]:
            yield "".join(map(str, path)), part
    else:
        kinds: tuple[Any, ...] = type(value).__mro__
        slots = [
            slot for kind in kinds for slot in getattr(kind, "__slots__", _MEMBERS.get(kind, ()))
        ]
        for key in (*getattr(value, "__dict__", ()), *slots):
            if not key.startswith("__"):
                yield f".{key}", getattr(value, key, None)


def tensors_kept(modules: Mapping[str, nn.Module]) -> _Found:
    """Yield each buffer and tensor attribute with its path, but none that a hook sets."""
    usual = nn.Module().__dict__.keys()
    for name, module in modules.items():
        hooks: dict[int, Any] = vars(module)["_forward_pre_hooks"]
        set_anew = {getattr(hook, "name", None) for hook in hooks.values()}
        own = {key: value for key, value in vars(module).items() if key not in usual}
        for key, value in {**own, **vars(module)["_buffers"]}.items():
            if key not in set_anew:
                yield from tensors_within(value, f"{name}.{key}" if name else key)


def memory_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the storage number of `tensor` and the bytes it spans, half-open, if any."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()
        number = storage._cdata if tensor.is_meta else storage.data_ptr()  # pyright: ignore[reportPrivateUsage]
    except (NotImplementedError, RuntimeError):
        return None
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1 + sum(step * (size - 1) for step, size in steps)
    start = int(tensor.storage_offset())
    return number, start * tensor.element_size(), (start + reach) * tensor.element_size()
