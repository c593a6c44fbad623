# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Moves gradients from where autograd or a layer left them to where they are reduced."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_asynchzp.engine.sharding.pieces import GradPiece
from megatron_asynchzp.engine.zero.unit import HZPUnit


def has_grads(unit: HZPUnit) -> bool:
    with unit.guard.without_torch_function():
        for param in unit.params:
            if param.grad is not None:
                return True
    return False


def point_at_places(unit: HZPUnit, places: Sequence[torch.Tensor]) -> None:
    """Let layers write gradients to `places` (fp32, one per parameter): [Note: fused gradients]."""
    params: list[Any] = unit.params
    for param, place in zip(params, places, strict=True):
        param.main_grad = place


def take_grads(unit: HZPUnit, indices: Iterable[int], taken: dict[int, torch.Tensor]) -> None:
    """Move the gradients of the parameters `indices` to `taken`; later ones are added in fp32."""
    with unit.guard.without_torch_function():
        for index in indices:
            param = unit.params[index]
            if (grad := param.grad) is None:
                continue
            if grad.is_sparse:  # nn.Embedding(sparse=True)
                grad = grad.to_dense()
            param.grad = None
            if (before := taken.setdefault(index, grad)) is grad:
                continue
            if before.dtype == torch.float32:
                before.add_(grad)  # as autograd would
            else:
                taken[index] = before.float().add_(grad)


def write_grads(
    unit: HZPUnit,
    indices: Iterable[int],
    places: Sequence[torch.Tensor],
    written: set[int] | None = None,
) -> None:
    """Move the gradients of the parameters `indices` to `places` (fp32), in one operation.

    Args:
        unit: Of the parameters.
        indices: Those without a gradient are skipped.
        places: One per parameter. A layer's own gradient is there already.
        written: Indices of places to which the next gradient is added; None: all.
    """
    is_fused = unit.overwrites_main_grads is not None
    new: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    more: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    with unit.guard.without_torch_function():
        for index in indices:
            param = unit.params[index]
            if (grad := param.grad) is None:
                continue
            if is_fused and _has_dummy(param):
                param.grad = None
                if written is not None:
                    written.add(index)
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            into, grads = more if written is None or index in written else new
            into.append(places[index])
            grads.append(grad)
            param.grad = None
            if written is not None:
                written.add(index)
    if new[0]:
        torch._foreach_copy_(*new)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    if more[0]:
        torch._foreach_add_(*more)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def give_grad(param: Any, grad: torch.Tensor) -> None:
    """Let the optimizer find `grad`; with another dtype than `param` as `decoupled_grad`."""
    setattr(param, "grad" if grad.dtype == param.dtype else "decoupled_grad", grad)


def given_grad(param: Any) -> torch.Tensor | None:
    return param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)


def forget_grad(param: Any) -> None:
    """Remove the gradient of `param`, so that the optimizer does not update it."""
    param.grad = None
    if hasattr(param, "decoupled_grad"):
        param.decoupled_grad = None


def zero_rest(places: Sequence[torch.Tensor], written: Container[int]) -> None:
    """Zero those of `places`, of parameters and gaps, that are not among `written`."""
    _zero([place for index, place in enumerate(places) if index not in written])


def pack_grads(
    piece: GradPiece, grads: Mapping[int, torch.Tensor], places: Sequence[torch.Tensor]
) -> None:
    """Write the part of `grads` (by index) that `piece` holds to `places`; the rest becomes 0."""
    sources: list[torch.Tensor] = []
    into: list[torch.Tensor] = []
    rest = list(places[len(piece.copies) :])  # the gaps
    for copy, place in zip(piece.copies, places):
        if (grad := grads.get(copy.index)) is None:
            rest.append(place)
            continue
        cut = copy.source
        sources.append(grad if cut is None else grad.reshape(-1)[slice(*cut)])
        into.append(place)
    if sources:
        torch._foreach_copy_(into, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    _zero(rest)


def places_of(unit: HZPUnit, piece: GradPiece, full: torch.Tensor) -> list[torch.Tensor]:
    """Return views of `full` (1-D, fp32, piece.numel) for each copy of `piece`, then its gaps."""
    places: list[torch.Tensor] = []
    for copy in piece.copies:
        place = full[slice(*copy.target)]
        shape = unit.layout.slices[copy.index].shape
        places.append(place.view(shape) if copy.source is None else place)
    return places + [full[slice(*gap)] for gap in piece.gaps]


def _zero(tensors: list[torch.Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _has_dummy(param: Any) -> bool:
    """Return whether `param.grad` is a dummy for a gradient in main_grad, and reset the answer."""
    was_added, param.grad_added_to_main_grad = param.grad_added_to_main_grad, False
    return was_added and not getattr(param, "zero_out_wgrad", False)
