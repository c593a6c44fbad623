# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how each system of the schedule benchmark is built and stepped.

Every one trains the same model on the same data with the same optimizer in fp32.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.library.arguments import check_model, checked_call, checked_units
from megatron_asynchzp.library.runtime import runtime_of
from scripts.testbed.contenders.adam import new_adamw, owned_params
from scripts.testbed.contenders.delayed_model import DelayedModel, ModelSize, batch_of
from scripts.testbed.contenders.fsdp2 import SHARDINGS, Sharding, shard_fully
from scripts.testbed.contenders.hierarchical_baseline import HierarchicalBaseline


class System:
    """A system that trains: `update` runs after each backward.

    trains: whether its losses must be those of the others.
    halves: each Linear is a unit, with the norm before it, not each block.
    is_early: updated parameters are sent while backward goes on. The engine clips by the norm of
    all gradients all the same; the baseline updates each unit for good and cannot.
    volume(n, r, blocks): bytes that leave a node in one step, in units of the fp32 parameters.
    """

    trains = True
    halves = False
    is_early = False
    max_norm = 1e6  # of gradients, which no step reaches

    def __init__(self, size: ModelSize, mesh: DeviceMesh):
        self.size, self.mesh = size, mesh
        self.device = torch.device(mesh.device_type)
        self.model = DelayedModel(size).to(self.device)
        self.num_steps = 0
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Before the first forward."""

    def mark(self, is_last: bool) -> None:
        """Before the forward of a micro-batch."""

    def drain(self) -> None:
        """Return when nothing of the steps so far is in flight."""

    def close(self) -> None:
        """End threads."""

    def step(self) -> float:
        """One training step; this rank's loss."""
        return self.step_on_device().item()

    def step_on_device(self) -> torch.Tensor:
        """As `step`, but the host waits for nothing."""
        self.begin()
        losses = []
        num_batches = self.size.micro_batches
        for index in range(num_batches):
            x, y = batch_of(self.size, self.num_steps * num_batches + index, dist.get_rank())
            x, y = x.detach().to(self.device).requires_grad_(), y.to(self.device)
            self.mark(index == num_batches - 1)
            loss = nn.functional.mse_loss(self.forward(x), y) / num_batches
            loss.backward()
            losses.append(loss.detach())
        self.num_steps += 1
        self.update()
        return torch.stack(losses).sum()


def no_volume(n: int, r: int, blocks: int) -> float:
    return 0.0


def hierarchical_volume(n: int, r: int, blocks: int) -> float:
    """Each node sends its share of the gradients once and of the parameters once."""
    return 2 * (n - 1) / n


class WithOptimizer(System):
    """Sharding and reduction happen inside the model; one optimizer over its parameters."""

    def add_optimizer(self, params) -> None:
        self.optimizer = new_adamw(params)

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()


class ComputeOnly(WithOptimizer):
    """No communication, and the optimizer of a rank that owns one shard: the floor."""

    trains, volume = False, staticmethod(no_volume)

    def build(self) -> None:
        shard = sum(param.numel() for param in self.model.parameters()) // self.mesh.size()
        self.shard = nn.Parameter(torch.zeros(shard, device=self.device))
        self.shard.grad = torch.zeros(shard, device=self.device)
        self.add_optimizer([self.shard])


class DDP(WithOptimizer):
    def build(self) -> None:
        nbytes = sum(4 * param.numel() for param in self.model.parameters())
        self.forward = DistributedDataParallel(
            self.model,
            bucket_cap_mb=0.9 * nbytes / self.size.blocks / 2**20,  # a bucket for each block
            gradient_as_bucket_view=True,
        )
        self.add_optimizer(self.model.parameters())

    def mark(self, is_last: bool) -> None:
        self.forward.require_backward_grad_sync = is_last  # pyright: ignore

    @staticmethod
    def volume(n: int, r: int, blocks: int) -> float:
        return 2 * (n * r - 1) / (n * r)


class FSDP2(WithOptimizer):
    """fully_shard in one of the SHARDINGS; the last block's parameters are kept for backward.

    torch can run an optimizer per parameter within backward; the emulated streams cannot order it
    after a reduction, so it is not measured.
    """

    sharding: Sharding

    def build(self) -> None:
        blocks: list[Any] = list(self.model.blocks)
        parts = [[[block], [block.down]] if self.halves else [[block]] for block in blocks]
        forward = [unit for of_block in parts for unit in of_block]
        # Backward too meets a block before what is in it.
        backward = [unit for of_block in reversed(parts) for unit in of_block]
        cluster = self.mesh.size(0), self.mesh.size(1)
        shard_fully(self.model, forward, self.sharding, cluster, len(parts[-1]), backward)
        self.add_optimizer(self.model.parameters())

    def mark(self, is_last: bool) -> None:
        # Over nodes once a step, as ours: in between a node has its sum.
        model: Any = self.model
        model.set_requires_all_reduce(is_last)

    @classmethod
    def volume(cls, n: int, r: int, blocks: int) -> float:
        if cls.sharding.is_hybrid:
            return hierarchical_volume(n, r, blocks)
        gathers = 1 if cls.sharding.keeps_params else 2 - 1 / blocks
        return (gathers + 1) * (n * r - 1) / (n * r)


class Baseline(System):
    """Two threads and an optimizer per unit, with the sharding of the engine."""

    volume = staticmethod(hierarchical_volume)

    def build(self) -> None:
        units = [
            unit
            for block in self.model.blocks
            for unit in ([(block.norm, block.up), (block.down,)] if self.halves else [(block,)])
        ]
        self.baseline = HierarchicalBaseline(units, self.mesh, self.is_early)
        self.drain = self.baseline.drain

    def update(self) -> None:
        self.baseline.step_optimizer()


def new_runtime(
    model: nn.Module,
    units: list[Any],
    sizes: ShardSizes,
    group: dist.ProcessGroup | None,
    schedule: ScheduleConfig,
) -> HZPRuntime:
    """The engine around `model` without an optimizer. group: None for all ranks."""
    units = checked_units(model, units, None)
    call = checked_call(sizes, torch.optim.SGD, group, schedule)
    check_model(model, units, call)
    return runtime_of(model, units, call)[0]


class Engine(System):
    """Our engine: parameters and gradients over a node's ranks, optimizer states over all.

    `kind`: of its schedule; `timed_every`: on a device one step in this many is timed; `is_forced`:
    if it is early, every unit is sent early, whatever the steps before.
    """

    kind, timed_every, is_forced = "threaded", 10, False
    volume = staticmethod(hierarchical_volume)

    def build(self) -> None:
        blocks: list[Any] = list(self.model.blocks)
        units = blocks + [block.down for block in blocks if self.halves]
        schedule = ScheduleConfig(self.kind, timed_every=self.timed_every)
        self.runtime = self.new_runtime(units, schedule)
        owned = {unit: owned_params(unit) for unit in self.runtime.units}
        self.optimizer = new_adamw([param for params in owned.values() for param in params])
        if self.is_early:
            self.runtime.early_sends.early_update = EarlyUpdate(
                self.optimizer, owned, self.is_forced
            )
        self.drain = self.runtime.settle
        self.close = self.runtime.close

    def new_runtime(self, units: list[Any], schedule: ScheduleConfig) -> HZPRuntime:
        world_size, in_node = self.mesh.size(), self.mesh.size(1)
        sizes = ShardSizes(in_node, in_node, world_size)
        return new_runtime(self.model, units, sizes, None, schedule)

    def begin(self) -> None:
        self.runtime.zero_grads()

    def mark(self, is_last: bool) -> None:
        if is_last:
            with self.runtime.no_sync():
                pass  # the next one is the last

    def update(self) -> None:
        self.runtime.sync_grads()
        skip_unchanged = self.runtime.early_sends.early_update is not None and self._clip() == 1.0
        self.optimizer.step()
        self.runtime.sync_params(skip_unchanged)

    def _clip(self) -> float:
        """Clip the gradients by their global norm, as Megatron does; the factor."""
        grads = [param.grad for param in self.optimizer.param_groups[0]["params"]]
        squares = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(squares)  # pyright: ignore[reportUnknownMemberType]
        factor = min(1.0, self.max_norm / (squares.sqrt().item() + 1e-6))
        if factor < 1.0:
            for grad in grads:
                grad.mul_(factor)
        return factor


class _Mean(torch.autograd.Function):
    """Over a tensor-parallel group, in forward or in backward alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, in_forward: bool
    ) -> torch.Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        return _mean(x, group) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] if ctx.in_forward else _mean(grads[0], ctx.group), None, None


def _mean(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    return x


class BesideTensorParallel(Engine):
    """The engine over the nodes, while the ranks of a node reduce around each block."""

    kind = "main-thread"

    def build(self) -> None:
        group = self.mesh.get_group(1)
        for block in cast("list[Any]", list(self.model.blocks)):
            block.norm.register_forward_hook(lambda *given: _Mean.apply(given[2], group, False))
            block.down.register_forward_hook(lambda *given: _Mean.apply(given[2], group, True))
        super().build()

    def new_runtime(self, units: list[Any], schedule: ScheduleConfig) -> HZPRuntime:
        nodes = self.mesh.size(0)
        sizes, group = ShardSizes(nodes, nodes, nodes), self.mesh.get_group(0)
        return new_runtime(self.model, units, sizes, group, schedule)


class MegatronFSDP2(WithOptimizer):
    """Megatron-FSDP v2, `experimental` in its wheel: HSDP. For CUDA alone."""

    def build(self) -> None:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental
        from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import placement

        mesh = self.mesh
        states = [placement.Replicate(), placement.Flat()]
        # Gradients add up over the nodes after the last micro-batch.
        grads = [placement.Partial(dist.ReduceOp.AVG), placement.Flat()]
        placements = experimental.Placements([0, 1], states, grads, states)
        for block in self.model.blocks:
            experimental.fully_shard(block, mesh, placements)
        experimental.fully_shard(self.model, mesh, placements)
        self.add_optimizer(self.model.parameters())
        experimental.fully_shard_optimizer(self.optimizer)
        self._new_micro_batch = experimental.microbatch
        self._micro_batch = ExitStack()

    def mark(self, is_last: bool) -> None:
        self._micro_batch.close()
        self._micro_batch.enter_context(self._new_micro_batch(self.model, is_last))

    def update(self) -> None:
        self._micro_batch.close()
        self.optimizer.step()
        self.optimizer.zero_grad()


class CommunicationOnly(Engine):
    """Our engine at its fastest around blocks that take no time, on one row."""

    trains, halves, is_early = False, True, True

    def __init__(self, size: ModelSize, mesh: DeviceMesh):
        super().__init__(replace(size, block_ms=0.0, rows=1), mesh)


class ClippedAfterSending(Engine):
    """Every step is clipped after its units were sent, so that parameters are sent twice."""

    trains, halves, is_early, is_forced, max_norm = False, True, True, True, 1e-4

    @staticmethod
    def volume(n: int, r: int, blocks: int) -> float:
        return 3 * (n - 1) / n


def _variants(name: str, system: type[System], **attributes: Any) -> dict[str, type[System]]:
    """Return `system` with units of whole and half blocks, updated late and early."""
    updates = (False, True) if issubclass(system, Engine | Baseline) else (False,)
    variants = {
        f"{name}{', halves' if halves else ''}{', early update' if early else ''}": type(
            system.__name__, (system,), attributes | {"halves": halves, "is_early": early}
        )
        for early in updates
        for halves in (False, True)
    }
    return cast("dict[str, type[System]]", variants)


def _all_systems() -> dict[str, type[System]]:
    """By name, in the order of their turns."""
    systems: dict[str, type[System]] = {
        "compute only": ComputeOnly,
        "communication only": CommunicationOnly,
    }
    for kind in ("threaded", "main-thread", "inline"):
        systems |= _variants(kind, Engine, kind=kind)
    # A step whose early units are sent again, to be looked at.
    systems["early and clipped"] = ClippedAfterSending
    systems |= _variants("baseline", Baseline)
    for name, sharding in SHARDINGS.items():
        systems |= _variants(name.replace("-", " "), FSDP2, sharding=sharding)
    return systems | {"ddp": DDP}


SYSTEMS = _all_systems()
