# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the step of one model chunk: which unit is gathered, reduced and released when.
Must not know Megatron.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.zero.hooks import attach_grad_hooks, attach_unit_hooks
from megatron_asynchzp.zero.plan import UnitPlan
from megatron_asynchzp.zero.saved_views import SavedViews
from megatron_asynchzp.zero.unit import HZPUnit


@dataclass
class _MicroBatch:
    """What the runtime knows of the forward and backward that run now."""

    in_backward: bool = False
    forward_depth: Counter[HZPUnit] = field(default_factory=Counter)
    forward_calls: Counter[HZPUnit] = field(default_factory=Counter)
    started_backward: set[HZPUnit] = field(default_factory=set)
    reduced: set[HZPUnit] = field(default_factory=set)


class HZPRuntime:
    """The sharded engine around one module (a model chunk), synchronous form.

        forward   unit:  unshard | compute | reshard
        backward  unit:  unshard | compute | reshard, reduce gradients (G axes)
        step      all:   sync_grads (G to O, replicas) | optimizer | sync_params (O to P)

    Every rank of a sharding group runs the same units in the same order, hence issues the same
    collectives in the same order (law 3).

    root: the module whose call is one forward; plans: a partition of its parameters;
    groups: communicators by group key of the plans.
    """

    def __init__(
        self, root: nn.Module, plans: Sequence[UnitPlan], groups: dict[str, ShardGroups]
    ):
        self.units: list[HZPUnit] = []
        self.group_keys: dict[HZPUnit, str] = {}
        self._saved_views = SavedViews(on_missing=self._unshard)
        self._batch = _MicroBatch()
        self._reduce_last: set[HZPUnit] = set()
        self._reduced_before: frozenset[HZPUnit] | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        units_of: dict[nn.Module, list[HZPUnit]] = {root: []}
        for plan in plans:
            unit = HZPUnit(plan.name, plan.params, groups[plan.group_key])
            self.units.append(unit)
            self.group_keys[unit] = plan.group_key
            if len(plan.modules) > 1:
                self._reduce_last.add(unit)
            for module in plan.modules:
                units_of.setdefault(module, []).append(unit)
        self._attach(root, units_of)

    def _attach(self, root: nn.Module, units_of: dict[nn.Module, list[HZPUnit]]) -> None:
        # The hooks are owned by the model, the runtime by the wrapper: a proxy breaks the cycle.
        events = weakref.proxy(self)
        # Registered before the units' own hooks and prepended after them: runs first.
        for module, units in units_of.items():
            self._handles += attach_unit_hooks(module, units, events)
        self._handles.append(
            root.register_forward_pre_hook(lambda *_: events.begin_forward(), prepend=True)
        )
        for unit in self.units:
            self._handles += attach_grad_hooks(unit, events)

    # ---- one micro-batch

    def begin_forward(self) -> None:
        """The root is called: a new micro-batch, or a recomputation within backward."""
        if not self._batch.in_backward:
            self._batch.forward_calls.clear()
            self._batch.forward_depth.clear()

    def before_forward(self, units: list[HZPUnit]) -> None:
        # First what after_forward undoes, then what can fail.
        self._saved_views.push()
        self._batch.forward_depth.update(units)
        for unit in units:
            if not self._batch.in_backward:
                self._batch.forward_calls[unit] += 1
                if self._batch.forward_calls[unit] > 1:
                    self._reduce_last.add(unit)  # its gradient is complete with the first call's
            self._unshard(unit)

    def after_forward(self, units: list[HZPUnit]) -> None:
        self._saved_views.pop()
        for unit in units:
            self._batch.forward_depth[unit] -= 1
            # A recomputation in backward is followed by that unit's backward: keep it gathered.
            if self._batch.forward_depth[unit] == 0 and not self._batch.in_backward:
                self._reshard(unit)

    def before_backward(self, units: list[HZPUnit]) -> None:
        if not self._batch.in_backward:
            self._batch.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for unit in units:
            self._batch.started_backward.add(unit)
            self._unshard(unit)

    def after_backward(self, units: list[HZPUnit]) -> None:
        for unit in units:
            self._reshard(unit)
            if unit not in self._reduce_last:
                self._reduce(unit)

    def grad_ready(self, unit: HZPUnit, index: int) -> None:
        unit.accumulate_grad(index)

    def _end_backward(self) -> None:
        """Autograd is done with this micro-batch: whatever is left is reduced in unit order."""
        for unit in self.units:
            if unit in self._batch.started_backward or unit.has_pending_grads:
                self._reduce(unit)
            self._reshard(unit)
        self._check_same_units_as_before()
        self._batch.started_backward.clear()
        self._batch.reduced.clear()
        self._batch.in_backward = False

    def _check_same_units_as_before(self) -> None:
        """Refuse a micro-batch that skipped a unit, or ran one that the first one skipped.

        If the other ranks did not do the same, their collectives would pair with those of other
        units here: equal sizes, wrong numbers, no error.
        """
        if self._reduced_before is None:
            self._reduced_before = frozenset(self._batch.reduced)
        if different := self._reduced_before ^ self._batch.reduced:
            names = ", ".join(sorted(unit.name for unit in different))
            raise RuntimeError(
                f"{names}: used in some micro-batches and not in others; the sharded engine needs "
                "every rank to call the same units in every micro-batch"
            )

    def _unshard(self, unit: HZPUnit) -> None:
        unit.unshard()
        self._saved_views.track(unit)

    def _reshard(self, unit: HZPUnit) -> None:
        if unit.phase is unit.phase.UNSHARDED:
            self._saved_views.forget(unit)
        unit.reshard()

    def _reduce(self, unit: HZPUnit) -> None:
        unit.reduce_grads()
        self._batch.started_backward.discard(unit)
        self._batch.reduced.add(unit)

    # ---- one step

    def zero_grads(self) -> None:
        """Start a step, or start it again: forget all gradients and any unfinished backward."""
        self._batch = _MicroBatch()
        for unit in self.units:
            unit.zero_grads()
            self._reshard(unit)

    def sync_grads(self, scale: float = 1.0) -> None:
        """After the last micro-batch: main_grad fragments become the sum over all ranks x scale."""
        for unit in self.units:
            unit.sync_grads(scale)

    def sync_params(self) -> None:
        """After the optimizer: model_param shards become the new main_param."""
        for unit in self.units:
            unit.sync_params()

    def detach(self) -> None:
        """Remove every hook; the parameters stay sharded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_nbytes(self) -> dict[str, int]:
        """Bytes at rest on this rank, by state, over all units."""
        total: Counter[str] = Counter()
        for unit in self.units:
            total.update(unit.state_nbytes())
        return dict(total)
