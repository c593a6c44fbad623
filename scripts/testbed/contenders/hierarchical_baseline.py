# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The least that hierarchical ZeRO with threads needs, as a baseline for the engine.

Parameters and gradients are sharded inside a node, optimizer states over all ranks. It knows one
kind of model: units that run one after the other, trained whole, one micro-batch per step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scripts.testbed.contenders.adam import new_adamw


class _UnitState:
    """Memory of one unit.

    `full` exists while the unit computes, `shard` is the node's part, `main` this rank's part of
    that.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh):
        self.params = [param for module in modules for param in module.parameters()]
        self.inter, self.intra = (mesh.get_group(name) for name in ("inter", "intra"))
        ranks = mesh.size()
        self.numel = sum(param.numel() for param in self.params)
        padded = -(-self.numel // ranks) * ranks
        self.full = torch.zeros(padded)
        torch.cat([param.data.view(-1) for param in self.params], out=self.full[: self.numel])
        self.nbytes = self.full.untyped_storage().nbytes()
        self.shard = self.full.chunk(self.intra.size())[self.intra.rank()].clone()
        self.main = nn.Parameter(self.shard.chunk(self.inter.size())[self.inter.rank()].clone())
        self.optimizer = new_adamw([self.main])
        offset = 0
        for param in self.params:
            param.data = self.full[offset : offset + param.numel()].view(param.shape)
            offset += param.numel()
        self.free()
        self.gather: Future | None = None
        self.reduction: Future | None = None
        self.update: Future | None = None
        self.is_full = False
        self.grads_missing = len(self.params)

    def free(self) -> None:
        """One storage that is resized: what autograd saved of it stays valid."""
        self.full.untyped_storage().resize_(0)
        self.gather, self.is_full = None, False

    def reduced_grad(self) -> torch.Tensor:
        """This rank's part of the gradient, after waiting for its reduction."""
        assert self.reduction is not None  # backward has submitted it
        return self.reduction.result()


class HierarchicalBaseline:
    """Gathers one unit ahead in one thread, reduces and updates over nodes in another.

    units: each the modules, in the order of their calls, whose parameters are gathered together.
    updates_in_backward: each unit is updated as soon as its gradient is reduced; every third unit's
    parameters are then rebuilt at once, the others' after backward, as in the engine.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        mesh: DeviceMesh,
        updates_in_backward: bool = False,
    ):
        self._units = [_UnitState(modules, mesh) for modules in units]
        self._updates_in_backward = updates_in_backward
        self._intra_thread, self._inter_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for index, modules in enumerate(units):
            first, last = modules[0], modules[-1]
            first.register_forward_pre_hook(lambda *_, i=index: self._use(i, i + 1))
            last.register_forward_hook(lambda *_, i=index: self._after_forward(i))
            last.register_full_backward_pre_hook(lambda *_, i=index: self._use(i, i - 1))
            for param in self._units[index].params:
                param.register_post_accumulate_grad_hook(lambda _, i=index: self._grad_ready(i))

    def _start_gather(self, state: _UnitState) -> Future:
        """Begin to gather the unit's parameters, unless that has begun."""
        if state.gather is not None:
            return state.gather
        state.full.untyped_storage().resize_(state.nbytes)
        update = state.update

        def gather() -> None:
            if update is not None:
                update.result()
            dist.all_gather_single(state.full, state.shard, group=state.intra)

        state.gather = self._intra_thread.submit(gather)
        return state.gather

    def _use(self, index: int, following: int) -> None:
        state = self._units[index]
        gathered = self._start_gather(state)
        if 0 <= following < len(self._units):
            self._start_gather(self._units[following])
        if not state.is_full:
            gathered.result()
            state.is_full = True

    def _after_forward(self, index: int) -> None:
        if index < len(self._units) - 1:
            self._units[index].free()

    def _grad_ready(self, index: int) -> None:
        state = self._units[index]
        state.grads_missing -= 1
        if state.grads_missing:
            return
        state.grads_missing = len(state.params)
        state.update = None  # the one that the gathers of this step waited for
        grad = torch.zeros(state.full.numel())
        torch.cat([_take_grad(param) for param in state.params], out=grad[: state.numel])
        state.free()
        of_node = self._intra_thread.submit(_reduce_scattered, state.intra, lambda: grad)
        state.reduction = self._inter_thread.submit(_reduce_scattered, state.inter, of_node.result)
        if self._updates_in_backward:
            self._inter_thread.submit(self._update, state)
            if index % 3 == 0:
                self._start_rebuild(state)

    def step_optimizer(self) -> None:
        """After backward: update all units that are not, and rebuild their parameters."""
        if not self._updates_in_backward:
            for state in self._units:
                state.reduced_grad()  # Megatron clips by the norm of all gradients first
            for state in self._units:
                self._update(state)
        for state in self._units:
            if state.update is None:
                self._start_rebuild(state)

    def _update(self, state: _UnitState) -> None:
        state.main.grad = state.reduced_grad()
        state.optimizer.step()
        state.main.grad = state.reduction = None

    def _start_rebuild(self, state: _UnitState) -> None:
        state.update = self._inter_thread.submit(
            dist.all_gather_single, state.shard, state.main.data, group=state.inter
        )

    def drain(self) -> None:
        """Return when all parameters are up to date."""
        for state in self._units:
            if state.update is not None:
                state.update.result()


def _take_grad(param: nn.Parameter) -> torch.Tensor:
    """The gradient in one dimension; the parameter has none afterwards."""
    grad, param.grad = param.grad, None
    assert grad is not None  # all gradients of the unit are accumulated
    return grad.view(-1)


def _reduce_scattered(group: Any, get_input: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Average over a group, this rank's part of it."""
    full = get_input()
    output = full.new_empty(full.numel() // group.size())
    dist.reduce_scatter_single(output, full, op=dist.ReduceOp.AVG, group=group)
    return output
