# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine without Megatron: an HZPRuntime around a toy model with a plain AdamW loop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.engine.comm.collectives import run_steps
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import (
    UnitInFlight,
    least_in_flight,
    memory_in_flight,
)
from megatron_asynchzp.engine.sharding.layout import FlatLayout
from megatron_asynchzp.engine.sharding.topology import Range, ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.engine.zero.plan import UnitPlan, plan_units
from megatron_asynchzp.engine.zero.step import KeepBudgets
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.contenders.adam import owned_params
from tests.support.toy_models import ToyLM, toy_batch, toy_loss


def nested_sizes(world_size: int) -> list[tuple[int, int, int]]:
    """Every legal (param, grad, optim) for a world."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    legal = []
    for sizes in product(divisors, repeat=3):
        try:
            ShardSizes(*sizes).check(world_size)
        except ConfigurationError:
            continue
        legal.append(sizes)
    return legal


def cut_sizes(world_size: int) -> list[tuple[Any, ...]]:
    """Every legal (param, grad, optim, cuts) with as many cuts as there can be: one for a chain of
    prime factors, which is not the only one."""
    found = []
    for sizes in nested_sizes(world_size):
        ends, cuts = ShardSizes(*sizes).boundaries(sizes[2]), []
        for inner, outer in pairwise(ends):
            while end := next(
                (n for n in range(inner + 1, outer) if outer % n == n % inner == 0), 0
            ):
                cuts.append(end)
                inner = end
        if cuts:
            found.append((*sizes, tuple(cuts)))
    return found


def unshard(unit: HZPUnit) -> None:
    """Gather the parameters of `unit` into new memory, at once. Collective over its P group."""
    if not unit.is_unsharded:
        full = torch.empty(unit.layout.padded_numel, dtype=unit.dtype, device=unit.device)
        run_steps(unit.unshard_steps(full))
        unit.to_unsharded(full, unit.views_of(full))


@cache
def shard_groups(sizes: tuple[Any, ...], time_limit_s: float = 600.0) -> ShardGroups:
    """Communicators over the default group; once per rank, since creating them is slow."""
    topology = ShardTopology(dist.get_world_size(), dist.get_rank(), ShardSizes(*sizes))
    return ShardGroups.create(topology, dist.group.WORLD, timedelta(seconds=time_limit_s))


def with_memory(
    config: ScheduleConfig, units: Sequence[UnitInFlight], share: float
) -> ScheduleConfig:
    """With a budget for memory in flight from 0 (what one layer needs) to 1 (the default)."""
    default = memory_in_flight(units, config.depth)
    least, most = sum(least_in_flight(units)), default.params + default.grads
    return replace(config, in_flight_nbytes=round(least + share * (most - least)))


def on_submit(driver: Driver, note: Callable[[Task], object]) -> None:
    """Call `note` with each task before `driver` gets it."""
    submit = driver.submit

    def noted_submit(task: Task) -> Task:
        note(task)
        return submit(task)

    driver.submit = noted_submit


def own_fragments(unit: HZPUnit, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank's optimizer shard holds of `params`, which are as those of the unit."""
    own = []
    for piece, values in zip(unit.layout.slices, params, strict=True):
        part = piece.range.intersect(unit.optim_range)
        inside = part.within(piece.range) if part.numel else Range(0, 0)
        own.append(values.flatten()[inside.start : inside.stop])
    return own


def _in_flight(plan: UnitPlan, groups: ShardGroups, slot_nbytes: int) -> UnitInFlight:
    first, topology = plan.params[0][1], groups.topology
    shapes = [(name, tuple(param.shape)) for name, param in plan.params]
    layout = FlatLayout.build(shapes, topology.sizes.optim)
    return UnitInFlight.of(
        plan.layer,
        layout.padded_numel,
        first.dtype.itemsize,
        first.requires_grad,
        topology,
        slot_nbytes,
    )


def shard_model(
    model: nn.Module,
    sizes: Sequence[int],
    schedule: ScheduleConfig = ScheduleConfig(),
    driver: Driver | None = None,
    memory: float = 1.0,
    fuses_grads: bool = False,
    budgets: KeepBudgets | None = None,
    groups: ShardGroups | None = None,
) -> HZPRuntime:
    """A runtime over `groups`, or the default group; blocks, embedding and output are units.

    memory: in flight, from 0 (what one layer needs) to 1 (the default); budgets: of all chunks.
    """
    groups = groups or shard_groups(tuple(sizes), schedule.time_limit_s)
    tied = {model.embedding.weight: (model.output,)} if model.is_tied else {}
    unit_modules = [*model.blocks, model.embedding, model.output]
    plans = plan_units(model, unit_modules, also_used_by=tied)
    in_flight = [_in_flight(plan, groups, schedule.grad_slot_nbytes) for plan in plans]
    if not fuses_grads:
        schedule = with_memory(schedule, in_flight, memory)
    scale = 1.0 / groups.topology.world_size
    all_groups = {"dense": groups}
    return HZPRuntime(
        model, plans, all_groups, schedule, driver, scale, fuses_grads=fuses_grads, budgets=budgets
    )


class EngineTrainer:
    """AdamW on the fragments, averaged gradients, one loss per step."""

    def __init__(
        self,
        model: nn.Module,
        sizes: Sequence[int],
        trains_all: bool = True,
        schedule: ScheduleConfig = ScheduleConfig(),
        driver: Driver | None = None,
        sends_early: bool | None = None,
        memory: float = 1.0,
        fuses_grads: bool = False,
        budgets: KeepBudgets | None = None,
        groups: ShardGroups | None = None,
    ):
        """sends_early: units before the update, all of them or as many as there is room for."""
        self.model = model
        self.runtime = shard_model(
            model, sizes, schedule, driver, memory, fuses_grads, budgets, groups
        )
        self._topology = self.runtime.units[0].groups.topology
        assert not trains_all or all(unit.is_trained for unit in self.runtime.units)
        owned = {unit: owned_params(unit) for unit in self.runtime.units if unit.is_trained}
        params = [param for params in owned.values() for param in params]
        nothing = [nn.Parameter(torch.zeros(0))]
        self.optimizer = torch.optim.AdamW(params or nothing, lr=1e-2, weight_decay=0.1)
        if sends_early is not None:
            self.runtime.early_sends.early_update = EarlyUpdate(
                self.optimizer, owned, is_forced=sends_early
            )

    def step(self, step: int, micro_batches: int) -> float:
        total = self.local_step(step, micro_batches)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def local_step(self, step: int, micro_batches: int) -> torch.Tensor:
        """A step in which only the engine communicates; the loss is that of this rank."""
        total = self.backward(step, micro_batches)
        self.runtime.sync_grads()
        self.update()
        return total

    def backward(self, step: int, micro_batches: int, begins: bool = True) -> torch.Tensor:
        """Forward and backward of a step, or of one that goes on; the loss of this rank."""
        if begins:
            self.runtime.zero_grads()
        total = torch.zeros(())
        with self.runtime.no_sync():
            for index in range(micro_batches - 1):
                total += self._forward_backward(step, index, micro_batches)
        return total + self._forward_backward(step, micro_batches - 1, micro_batches)

    def update(self, factor: float = 1.0) -> None:
        """What comes after the gradients are complete. factor: of the gradients, as in clipping."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if factor != 1.0 and param.grad is not None:
                    param.grad.mul_(factor)
        self.optimizer.step()
        self.runtime.sync_params(skip_unchanged=True)

    def _forward_backward(self, step: int, index: int, micro_batches: int) -> torch.Tensor:
        vocab = self.model.embedding.num_embeddings
        batch = toy_batch(step, index, self._topology.rank, vocab)
        loss = toy_loss(self.model, batch) / micro_batches
        loss.backward()
        return loss.detach()

    def full_params(self) -> dict[str, torch.Tensor]:
        """Every parameter, gathered. Collective."""
        full = {}
        self.runtime.settle()
        for unit in self.runtime.units:
            unshard(unit)
            for name, param in zip(unit.param_names, unit.params):
                full[name] = param.detach().clone()
            unit.reshard()
        return full


def build_toy(dtype=torch.float32, **kwargs) -> ToyLM:
    """The same toy model on every rank."""
    torch.manual_seed(5)
    return ToyLM(**kwargs).to(dtype)
