# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the least that hierarchical ZeRO with threads needs: parameters and gradients sharded inside
a node, optimizer state over all ranks. A baseline for the engine, not a part of it: it knows one
kind of model (blocks in a list, trained whole, one micro-batch per step).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.delayed_model import DelayedModel, new_adamw


class _BlockState:
    """Memory of one block: `full` exists while the block computes, `shard` is the node's part,
    `main` this rank's part of that."""

    def __init__(self, block: nn.Module, mesh: dist.DeviceMesh):
        self.params = list(block.parameters())
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


class HierarchicalBaseline:
    """Gathers one block ahead in one thread, reduces and updates over nodes in another."""

    def __init__(self, model: DelayedModel, mesh: dist.DeviceMesh):
        self._blocks = [_BlockState(block, mesh) for block in model.blocks]
        self._intra_thread, self._inter_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, i=index: self._use(i, i + 1))
            block.register_forward_hook(lambda *_, i=index: self._after_forward(i))
            block.register_full_backward_pre_hook(lambda *_, i=index: self._use(i, i - 1))
            for param in block.parameters():
                param.register_post_accumulate_grad_hook(lambda _, i=index: self._grad_ready(i))

    def _start_gather(self, state: _BlockState) -> None:
        if state.gather is not None:
            return
        state.full.untyped_storage().resize_(state.nbytes)
        update = state.update

        def gather() -> None:
            if update is not None:
                update.result()
            dist.all_gather_single(state.full, state.shard, group=state.intra)

        state.gather = self._intra_thread.submit(gather)

    def _use(self, index: int, following: int) -> None:
        self._start_gather(self._blocks[index])
        if 0 <= following < len(self._blocks):
            self._start_gather(self._blocks[following])
        state = self._blocks[index]
        if not state.is_full:
            state.gather.result()
            state.is_full = True

    def _after_forward(self, index: int) -> None:
        if index < len(self._blocks) - 1:
            self._blocks[index].free()

    def _grad_ready(self, index: int) -> None:
        state = self._blocks[index]
        state.grads_missing -= 1
        if state.grads_missing:
            return
        state.grads_missing = len(state.params)
        grad = torch.zeros(state.full.numel())
        torch.cat([param.grad.view(-1) for param in state.params], out=grad[: state.numel])
        for param in state.params:
            param.grad = None
        state.free()
        of_node = self._intra_thread.submit(_reduce_scattered, state.intra, lambda: grad)
        state.reduction = self._inter_thread.submit(_reduce_scattered, state.inter, of_node.result)

    def step_optimizer(self) -> None:
        """After backward: update each block as its gradient arrives, send the result on its way."""
        for state in self._blocks:
            state.main.grad = state.reduction.result()
            state.optimizer.step()
            state.main.grad = state.reduction = None
            state.update = self._inter_thread.submit(
                dist.all_gather_single, state.shard, state.main.data, group=state.inter
            )

    def drain(self) -> None:
        """Return when all parameters are up to date."""
        for state in self._blocks:
            if state.update is not None:
                state.update.result()


def _reduce_scattered(group: Any, get_input: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Average over a group, this rank's part of it."""
    full = get_input()
    output = full.new_empty(full.numel() // group.size())
    dist.reduce_scatter_single(output, full, op=dist.ReduceOp.AVG, group=group)
    return output
