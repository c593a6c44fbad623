# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the engine's hooks on gradients, and autograd's nodes that accumulate them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.engine.sharding.in_flight import LARGE_GRAD_NBYTES
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

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
