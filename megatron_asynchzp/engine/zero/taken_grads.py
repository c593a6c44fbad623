# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the hooks on gradients, and moves gradients from autograd and layers to the reductions."""

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.engine.sharding.in_flight import LARGE_GRAD_NBYTES
from megatron_asynchzp.engine.sharding.layout import GradPiece
from megatron_asynchzp.engine.zero.unit import HZPUnit


class GradHooks:
    """The hooks after AccumulateGrad of a chunk, and the nodes that they hang on."""

    def __init__(self) -> None:
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._accumulators: list[Any] = []

    def attach(self, unit: HZPUnit, take: Callable[[HZPUnit, int], None], takes_all: bool) -> None:
        """Call `take` for each complete gradient that is large, or with `takes_all` for each."""
        # Python's collector does not see a tensor's hooks: a strong reference would never be freed.
        alive = weakref.ref(unit)

        def hook_of(index: int) -> Callable[[torch.Tensor], None]:
            def hook(_param: torch.Tensor) -> None:
                if (own := alive()) is not None:
                    take(own, index)

            return hook

        for index, param in enumerate(unit.params):
            if param.requires_grad and (takes_all or param.nbytes >= LARGE_GRAD_NBYTES):
                self._handles[param] = param.register_post_accumulate_grad_hook(hook_of(index))  # pyright: ignore[reportUnknownMemberType]

    def move_to_end(self, param: nn.Parameter) -> None:
        """Move the engine's hook behind those that other code has added: they read the gradient."""
        if (handle := self._handles.get(param)) is not None:
            hooks = cast("Any", param)._post_accumulate_grad_hooks
            hooks[handle.id] = hooks.pop(handle.id)  # torch calls them in the order of this dict

    def hold_accumulators(self, units: Sequence[HZPUnit]) -> None:
        """Keep the nodes that accumulate the gradients of `units`, made now if they are not held.

        [Note: side streams] Autograd runs such a node on the stream on which it was made, whichever
        stream made the gradient. Nodes of the first step are made on the computing stream (Megatron
        wraps a model on another one) and kept, so a module may compute its gradients on other
        streams, as Megatron's shared experts do.
        """
        for unit in () if self._accumulators else units:
            trained = [param for param in unit.params if param.requires_grad]
            with unit.guard.without_torch_function():
                edges = [torch.autograd.graph.get_gradient_edge(param) for param in trained]
            self._accumulators += [edge.node for edge in edges]

    def renew_accumulators(self, units: Sequence[HZPUnit]) -> None:
        """Let the next use of the parameters make new accumulating nodes.

        An old one may belong to another stream, and torch refuses to capture with it.
        """
        self._accumulators.clear()
        for unit in units:
            dtype = torch.float64 if unit.dtype != torch.float64 else torch.float32
            empty = torch.empty(0, dtype=dtype, device=unit.device)
            for param in unit.params:
                # torch forgets the node when the dtype changes.
                data, param.data = param.data, empty
                param.data = data

    def release_accumulators(self) -> None:
        # They keep the parameters, and so all of the engine, from Python's collector.
        self._accumulators.clear()


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
    indices: Iterable[int],  # those without a gradient are skipped
    places: Sequence[torch.Tensor],  # one per parameter; a layer's own gradient is there already
    written: set[int] | None = None,  # places to which the next gradient is added; None: all
) -> None:
    """Move the gradients of the parameters `indices` to `places` (fp32), in one operation."""
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
