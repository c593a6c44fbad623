# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whole parameters for code that reads or writes `param.data` of a model in shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.guard import ParamGuard, Use, new_guarded_class
from megatron_asynchzp.engine.zero.step import StepState
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.whole_tensors import whole_unit


@contextmanager
def whole(model: Any, writes: bool = False) -> Iterator[None]:
    """Let code within read whole parameters, between two steps.

    A unit is gathered when one of its parameters is used, and dropped when the next unit is: what
    the caller keeps of it stays valid. Collective: every rank uses the units in the same order.

    Args:
        model: Chunks, wrapped or not, or a list of them; a model that is not sharded is whole.
        writes: Keep written values of parameters, as if they had been loaded. Every rank writes the
            same values, to one unit after the other.

    Raises:
        ConfigurationError: Within a step, or for a write without `writes`.
    """
    runtimes = [
        runtime
        for runtime in runtimes_of(model)
        if runtime.state is not StepState.STREAMING  # whole already, within another whole()
    ]
    with ExitStack() as stack:
        for runtime in runtimes:
            runtime.check_between_steps("whole()")
            stack.enter_context(runtime.streaming())
        units = [unit for runtime in runtimes for unit in runtime.units]
        gathered = _GatheredUnits(units, writes)
        try:
            yield
        finally:
            gathered.close()
    if writes:
        _take_over(runtimes)


def runtimes_of(model: Any) -> list[HZPRuntime]:
    """Return the runtimes of those chunks of a model, wrapped or not, that are in shards."""
    chunks: Any = unwrap_model(list(model) if isinstance(model, Sequence) else [model])
    own = {id(param) for chunk in chunks for param in chunk.parameters()}
    return [
        runtime
        for runtime in Communication.open_runtimes()
        if any(id(param) in own for unit in runtime.units for param in unit.params)
    ]


@torch.no_grad()
def _take_over(runtimes: Sequence[HZPRuntime]) -> None:
    """Let main parameters and the next gathers have the values in the parameter shards.

    Elements that were not written keep their main parameters, which have more bits.
    """
    for runtime in runtimes:
        for unit in runtime.units:
            if unit.is_trained and not unit.is_main_param_aliased:
                main, shard = unit.main_param.storage, unit.model_param.view(unit.optim_range)
                shard = shard.to(main.device)
                main.copy_(torch.where(main.to(shard.dtype) == shard, main, shard.to(main.dtype)))
            unit.marks.note_rewritten()
        runtime.gathers.note_written()


class _GatheredUnits:
    """The units that are whole now: those of the last use of a parameter."""

    def __init__(self, units: Sequence[HZPUnit], writes: bool):
        self._writes = writes
        self._whole: dict[HZPUnit, torch.Tensor] = {}
        sharded = [unit for unit in units if not unit.is_always_unsharded]
        self._unit_of = {id(param): unit for unit in sharded for param in unit.params}
        kinds = {type(param) for unit in sharded for param in unit.params}
        guarded = {kind: new_guarded_class(kind, self._answer) for kind in kinds}
        self._guards = {unit: ParamGuard(unit.params) for unit in sharded}
        for unit, guard in self._guards.items():
            guard.arm([guarded[type(param)] for param in unit.params])
            guard.hide()

    def _answer(self, use: Use, args: tuple[Any, ...], more: Mapping[str, Any]) -> Any:
        used = [self._unit_of.get(id(leaf)) for leaf in tree_leaves((args, more))]
        needed = dict.fromkeys(unit for unit in used if unit is not None)
        for unit in [unit for unit in self._whole if unit not in needed]:
            self._drop(unit)
        for unit in needed:
            if unit not in self._whole:
                self._gather(unit)
        return use(*args, **more)

    def _gather(self, unit: HZPUnit) -> None:
        full = self._whole[unit] = whole_unit(unit)
        self._guards[unit].reveal()
        unit.to_unsharded(full, unit.views_of(full))

    @torch.no_grad()
    def _drop(self, unit: HZPUnit) -> None:
        full, shard = self._whole.pop(unit), unit.model_param
        unit.reshard()
        self._guards[unit].hide()
        part = full[shard.range.start : shard.range.stop]
        if self._writes:
            shard.storage.copy_(part)
        elif not torch.equal(part.view(torch.uint8), shard.storage.view(torch.uint8)):
            raise ConfigurationError(
                f"{unit.name}: its parameters were written within whole(), which only reads; use "
                "whole(model, writes=True)"
            )

    def close(self) -> None:
        """Drop the whole units; the parameters are as before."""
        try:
            for unit in list(self._whole):
                self._drop(unit)
        finally:
            for guard in self._guards.values():
                guard.reveal()
