# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine without Megatron: an HZPRuntime around a toy model with a plain AdamW loop."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.sharding.topology import ShardSizeError, ShardSizes, ShardTopology
from megatron_asynchzp.zero.plan import plan_units
from megatron_asynchzp.zero.runtime import HZPRuntime
from tests.support.toy_models import ToyLM, toy_batch, toy_loss


def nested_sizes(world_size: int) -> list[tuple[int, int, int]]:
    """Every legal (param, grad, optim) for a world."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    legal = []
    for sizes in product(divisors, repeat=3):
        try:
            ShardSizes(*sizes).check(world_size)
        except ShardSizeError:
            continue
        legal.append(sizes)
    return legal


@lru_cache(maxsize=None)
def shard_groups(sizes: tuple[int, int, int]) -> ShardGroups:
    """Communicators over the default group; once per rank, since creating them is slow."""
    topology = ShardTopology(dist.get_world_size(), dist.get_rank(), ShardSizes(*sizes))
    return ShardGroups.create(topology, list(range(dist.get_world_size())))


def shard_model(model: nn.Module, sizes: Sequence[int]) -> HZPRuntime:
    """A runtime over the default group; blocks, embedding and output are units."""
    groups = shard_groups(tuple(sizes))
    tied = {model.embedding.weight: (model.output,)} if model.is_tied else {}
    plans = plan_units(
        model, [*model.blocks, model.embedding, model.output], also_used_by=tied
    )
    return HZPRuntime(model, plans, {"dense": groups})


class EngineTrainer:
    """AdamW on the fragments, averaged gradients, one loss per step."""

    def __init__(self, model: nn.Module, sizes: Sequence[int], trains_all=True, lr=1e-2):
        self.model = model
        self.runtime = shard_model(model, sizes)
        self.fragments: list[nn.Parameter] = []
        self.grads: list[torch.Tensor] = []
        for unit in self.runtime.units:
            assert unit.is_trained or not trains_all
            if not unit.is_trained:
                continue
            for value, grad in zip(unit.main_param_fragments(), unit.main_grad_fragments()):
                if value.numel():
                    self.fragments.append(nn.Parameter(value))
                    self.grads.append(grad)
        self.optimizer = torch.optim.AdamW(self.fragments, lr=lr, weight_decay=0.1)

    def step(self, step: int, micro_batches: int) -> float:
        self.runtime.zero_grads()
        total = torch.zeros(())
        for index in range(micro_batches):
            loss = toy_loss(self.model, toy_batch(step, index, dist.get_rank())) / micro_batches
            loss.backward()
            total += loss.detach()
        self.runtime.sync_grads(1.0 / dist.get_world_size())
        for fragment, grad in zip(self.fragments, self.grads):
            fragment.grad = grad
        self.optimizer.step()
        self.runtime.sync_params()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def full_params(self) -> dict[str, torch.Tensor]:
        """Every parameter, gathered. Collective."""
        full = {}
        for unit in self.runtime.units:
            unit.unshard()
            for name, param in zip(unit.param_names, unit.params):
                full[name] = param.detach().clone()
            unit.reshard()
        return full


def build_toy(dtype=torch.float32, **kwargs) -> ToyLM:
    """The same toy model on every rank."""
    torch.manual_seed(5)
    return ToyLM(**kwargs).to(dtype)
