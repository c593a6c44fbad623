# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the toy model in a plain process, and by the engine as one rank of a loopback world.

Both update by `-rate x gradient`, whose one rounding is the same in every order.
"""

from collections.abc import Sequence

import torch

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units
from megatron_asynchzp.engine.zero.unit import HZPUnit
from scripts.gpu_check.loopback_world import LoopbackWorld, flat_of
from scripts.gpu_check.toy import ToyShape, loss_of, new_model

_RATE = 2.0**-5  # a power of two: the product with it is exact


class PlainTrainer:
    """main: fp32 parameters by name; grads: the sum of the latest step, fp32, by name."""

    def __init__(self, shape: ToyShape, device: torch.device):
        self.model = new_model(shape, device)
        self.main = {name: p.detach().float() for name, p in self.model.named_parameters()}
        self.grads: dict[str, torch.Tensor] = {}

    def step(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Train one step. Returns the loss of each micro-batch."""
        self.grads = {name: torch.zeros_like(value) for name, value in self.main.items()}
        losses = []
        for tokens in batches:
            loss = loss_of(self.model, tokens)
            loss.backward()
            losses.append(loss.detach())
            for name, param in self.model.named_parameters():
                grad = _read_on_this_stream(param.grad)
                self.grads[name] += grad
                param.grad = None
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                self.main[name] = self.main[name].add(self.grads[name], alpha=-_RATE)
                param.copy_(self.main[name])
        return losses

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, tokens)


def _read_on_this_stream(tensor: torch.Tensor | None) -> torch.Tensor:
    """Memory of a side stream is free when this one has read it, too."""
    assert tensor is not None
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream())
    return tensor


class LoopbackTrainer:
    """The engine around the same model. Close it at the end."""

    def __init__(
        self,
        shape: ToyShape,
        world: LoopbackWorld,
        sizes: tuple[int, int, int],
        schedule: ScheduleConfig,
        driver: Driver | None = None,
    ):
        self.world = world
        self.model = new_model(shape, world.device)
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        tied = {self.model.embedding.weight: (self.model.output,)} if shape.is_tied else {}
        units = [*self.model.blocks, self.model.embedding]
        plans = plan_units(
            self.model,
            units if shape.is_tied else [*units, self.model.output],
            also_used_by=tied,  # pyright: ignore[reportArgumentType]
        )
        groups = {"dense": world.groups(sizes)}
        self.runtime = HZPRuntime(self.model, plans, groups, schedule, driver, 1.0 / world.size)
        world.attend(self.runtime.driver, self.runtime.units, params)

    @property
    def units(self) -> list[HZPUnit]:
        return self.runtime.units

    def compute(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Forward and backward of a step; afterwards the gradients of this rank are complete."""
        runtime = self.runtime
        runtime.zero_grads()
        losses = []
        with runtime.no_sync():
            for tokens in batches[:-1]:
                losses.append(self._compute(tokens))
        losses.append(self._compute(batches[-1]))
        runtime.sync_grads()
        return losses

    def _compute(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def apply(self, updated: dict[str, torch.Tensor] | None = None) -> None:
        """Update the parameters.

        `updated`: the fp32 values that the other ranks' optimizers make of each parameter; None in
        a world whose numbers do not matter.
        """
        for unit in self.units:
            unit.main_param.storage.add_(unit.main_grad.view(unit.optim_range), alpha=-_RATE)
        if updated is not None:
            self.world.update(updated)
        self.runtime.sync_params()

    def step(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        losses = self.compute(batches)
        self.apply()
        return losses

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, tokens)

    def own_grads(
        self, values: dict[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return for each unit its name, its optimizer's gradient, and that part of `values`."""
        return [
            (unit.name, unit.main_grad.view(unit.optim_range).clone(), self._own(unit, values))
            for unit in self.units
        ]

    def own_params(
        self, values: dict[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """The same of the main parameters."""
        return [
            (unit.name, unit.main_param.storage.clone(), self._own(unit, values))
            for unit in self.units
        ]

    @staticmethod
    def _own(unit: HZPUnit, values: dict[str, torch.Tensor]) -> torch.Tensor:
        start, stop = unit.optim_range
        return flat_of(unit, values, torch.float32)[start:stop]

    def close(self) -> None:
        try:
            self.runtime.close()
        finally:
            self.world.close()
