# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which whole tensors a model has by name, and the check of values that it is to take over."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_WHOLE = "hand over the model's whole state_dict()"
_EXTRA = "_extra_state"


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that torch's own state_dict of `model` would have."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            is_saved = name.rpartition(".")[2] not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if is_saved and buffer.numel():
                yield name, buffer


def loadable_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each parameter and each persistent buffer of `model`, with all its names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for name, buffer in saved_buffers(model):
        names.setdefault(buffer, []).append(name)
    return [(each, tensor) for tensor, each in names.items()]


@torch.no_grad()
def problem_of_values(
    model: nn.Module,
    targets: list[tuple[list[str], torch.Tensor]],
    values: Mapping[str, Any] | None,
) -> str | None:
    """Return why `model`, whose loadable_tensors are `targets`, cannot load `values`, or None."""
    if values is None:
        return f"the source rank has no values; {_WHOLE} there"
    given = set(values)
    for names, target in targets:
        found = [name for name in names if name in given]
        if not found:
            return f"{names[0]} is not among the values; {_WHOLE}"
        first = values[found[0]]
        if (problem := _misfit(found[0], first, target)) is not None:
            return problem
        for other in found[1:]:
            if not _are_same(values[other], first):
                return (
                    f"{found[0]} and {other} are one tensor in the model, but have different "
                    "values here; build the model with separate weights, or leave one of them out"
                )
    empty = {name for name, buffer in model.named_buffers() if not buffer.numel()}
    known = {name for names, _ in targets for name in names} | empty
    for name in sorted(given - known):
        if name.rpartition(".")[2] == _EXTRA:
            return f"{name} is no tensor; call set_extra_state() on every rank, and leave it out"
        if name in dict(model.named_buffers()):
            return f"{name} is a buffer with persistent=False, which is not saved; leave it out"
        return f"{name} is not a parameter or persistent buffer of the model; leave it out"
    return None


def _misfit(name: str, value: Any, target: torch.Tensor) -> str | None:
    """Why `value` cannot become that of `target`."""
    if not isinstance(value, torch.Tensor) or value.is_meta or type(value.data) is not torch.Tensor:
        kind = "on the meta device" if isinstance(value, torch.Tensor) and value.is_meta else ""
        return f"{name} is {kind or f'a {type(value).__name__}'} there; it is to be a whole tensor"
    if value.shape != target.shape:
        return f"{name} has shape {tuple(value.shape)} there, {tuple(target.shape)} in the model"
    if not torch.can_cast(value.dtype, target.dtype) or (
        not target.is_floating_point()
        and not target.is_complex()
        and not torch.equal(value.to(target.dtype).to(value.dtype), value)
    ):
        return f"{name} is {value.dtype} there, {target.dtype} in the model, which cannot hold it"
    return None


def _are_same(one: Any, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return isinstance(one, torch.Tensor) and torch.equal(one.to(other.device), other)
