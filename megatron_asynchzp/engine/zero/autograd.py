# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Connects a model and autograd with the engine: hooks and the running micro-batch."""

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, override

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.timeline import COMPUTE, Timeline
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES
from megatron_asynchzp.engine.zero.calls import (
    ManualRegion,
    attach_call_hooks,
    called,
    hooks_of_call,
    wrap_calls,
)
from megatron_asynchzp.engine.zero.captured_grads import CapturedGrads
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.directions import Direction
from megatron_asynchzp.engine.zero.guard import NO_GRAPHS, Answer, new_guarded_class
from megatron_asynchzp.engine.zero.params import check_kept_views
from megatron_asynchzp.engine.zero.plan import UnitPlan
from megatron_asynchzp.engine.zero.saved_views import SavedViews
from megatron_asynchzp.engine.zero.step import KeepBudgets, StepScheduler, StepState
from megatron_asynchzp.engine.zero.taken_grads import GradHooks
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

_NOTHING = nullcontext()
_Units = Sequence[HZPUnit]


@dataclass
class _MicroBatch:
    in_backward: bool = False
    region: frozenset[HZPUnit] | None = None  # units of the manual region that runs
    kind: str = "training"  # see StepScheduler.barrier_on_kind_change
    calls: dict[HZPUnit, int] = field(default_factory=dict[HZPUnit, int])  # in this forward
    depth: dict[HZPUnit, int] = field(default_factory=dict[HZPUnit, int])  # calls that still run
    # Units in this backward whose reduction has not started, and those whose reduction has.
    started_backward: set[HZPUnit] = field(default_factory=set[HZPUnit])
    reduced: set[HZPUnit] = field(default_factory=set[HZPUnit])
    # See [Note: backward within a forward].
    read_within: set[HZPUnit] = field(default_factory=set[HZPUnit])


class _ComputeMarks:
    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._starts: dict[tuple[str, HZPUnit], Any] = {}

    def begin(self, direction: str, units: list[HZPUnit]) -> None:
        if self._timeline.is_capturing:
            for unit in units:
                self._starts.setdefault((direction, unit), self._timeline.device.mark())

    def end(self, direction: str, units: list[HZPUnit]) -> None:
        for unit in units if self._starts else ():
            if (start := self._starts.pop((direction, unit), None)) is not None:
                self._timeline.note(COMPUTE, f"{direction} {unit.name}", start)

    def forget(self) -> None:
        self._starts.clear()


class HZPRuntime(StepScheduler):
    """The sharded engine around a module (a model chunk): its hooks run the step.

    forward    unit:  unshard | compute | reshard
    backward   unit:  unshard | compute | reshard, reduce gradients (G axes)
    last one   unit:  and then G to O and over the replicas
    step       all:   sync_grads (wait) | optimizer | sync_params (O to P)
    """

    def __init__(
        self,
        root: nn.Module,  # its call is a forward
        plans: Sequence[UnitPlan],  # a partition of its parameters
        groups: dict[str, ShardGroups],  # by group key of the plans
        schedule: ScheduleConfig = ScheduleConfig(),
        driver: Driver | None = None,
        grad_scale: float = 1.0,
        construction: Construction | None = None,  # has the shards of modules that it cut
        fuses_grads: bool = False,  # layers write to main_grad ([Note: fused gradients])
        budgets: KeepBudgets | None = None,
        # torch.compile may trace calls of modules, without the hooks, and backward may begin within
        # a module ([Note: saved views])
        allows_compiled_modules: bool = False,
    ):
        self._fuses_grads = fuses_grads
        compiler: Any = torch.compiler
        self._around: Callable[[Any], Any] = (
            compiler.disable if allows_compiled_modules else _identity
        )
        self.group_keys: dict[HZPUnit, str] = {}
        self._saved_views = SavedViews(
            self._unshard_saved, may_go_without=not allows_compiled_modules
        )
        self._has_pushed: list[bool] = []
        self._batch = _MicroBatch()
        self._reduce_last: set[HZPUnit] = set()
        self.is_rehearsing = False
        self._captured_grads = CapturedGrads()
        self._resting: list[HZPUnit] = []
        self.grad_hooks = GradHooks()
        units_of: dict[nn.Module, list[HZPUnit]] = {root: []}
        for plan in plans:
            shard = None if construction is None else construction.take(plan)
            groups_of_unit = groups[plan.group_key]
            unit = HZPUnit(
                plan.name, plan.params, groups_of_unit, shard, plan.layer, plan.is_seated
            )
            self.group_keys[unit] = plan.group_key
            if len(plan.modules) > 1:
                self._reduce_last.add(unit)
            for module in plan.modules:
                units_of.setdefault(module, []).append(unit)
        if fuses_grads or any(plan.is_seated for plan in plans):
            # Layers write whole gradients, and a graph overwrites its last ones: a single piece.
            largest = max(unit.layout.padded_numel for unit in self.group_keys)
            schedule = replace(schedule, grad_slot_nbytes=FP32_NBYTES * largest)
        super().__init__(list(self.group_keys), schedule, driver, grad_scale, budgets)
        self._compute_marks = _ComputeMarks(self.driver.timeline)
        self._root, self._units_of = root, units_of
        self._attach(root, units_of)

    def _attach(self, root: nn.Module, units_of: dict[nn.Module, list[HZPUnit]]) -> None:
        # The model owns the hooks, and the wrapper owns the runtime: a proxy breaks the cycle.
        runtime = weakref.proxy(self)
        captured = [module for module, units in units_of.items() if any(u.is_seated for u in units)]
        # Megatron refuses torch's hooks within a layer that it captures.
        within = {part for module in captured for part in module.modules()}
        for module, units in units_of.items():
            if module in within:
                wrap_calls(module, units, runtime)
            else:
                attach_call_hooks(module, units, runtime, self._around)

        def begin_forward(_root: nn.Module, _args: object) -> None:
            runtime.begin_forward()

        def end_forward(_root: nn.Module, _args: object, _output: object) -> None:
            runtime.end_forward()

        def take(unit: HZPUnit, index: int) -> None:
            if not runtime.is_rehearsing:
                runtime.reductions.take(unit, (index,))

        # Prepended last, so it runs before the units' hooks.
        root.register_forward_pre_hook(self._around(begin_forward), prepend=True)
        root.register_forward_hook(self._around(end_forward), always_call=True)
        for unit in self.units:
            self.grad_hooks.attach(unit, take, takes_all=unit in self._reduce_last)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let the method `name` count as a call, as torch's register_fsdp_forward_method."""
        method, runtime = getattr(module, name), weakref.proxy(self)
        before, after = hooks_of_call(self._units_of.get(module, []), runtime)
        is_root = module is self._root

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_root:
                runtime.begin_forward()
            try:
                return called(module, method, before, after, args, kwargs)
            finally:
                if is_root:
                    runtime.end_forward()

        setattr(module, name, call)

    def manual_region(
        self, units: _Units, completes: _Units = (), recomputed: _Units = ()
    ) -> ManualRegion:
        """Return a region of the model's work that runs by hand, not by calls of its modules.

        Args:
            units: Their parameters are read in its forward or backward.
            completes: Units whose gradients are final after its backward.
            recomputed: Units with which its backward recomputes an earlier region.
        """
        if self._fuses_grads:
            raise RuntimeError(
                "layers that write to main_grad cannot run in manual regions; set fuses_grads=False"
            )
        return ManualRegion(weakref.proxy(self), list(units), list(completes), list(recomputed))

    @contextmanager
    def rehearsing(self, leaving_grads: Collection[nn.Parameter] = ()) -> Generator[None]:
        """Wrap the capture of CUDA graphs of modules with a seat, outside of steps. Collective.

        Calls within compute with zeros as parameters. At the end `leaving_grads` has the parameters
        whose captured backwards add gradients to main_grad instead of giving them to autograd.
        """
        self.settle()
        seated = [unit for unit in self.units if unit.is_seated]
        self.grad_hooks.renew_accumulators(seated)
        with self.gathers.rehearsing(), self._captured_grads.rehearsing(seated, leaving_grads):
            self.is_rehearsing = True
            try:
                yield
            finally:
                self.is_rehearsing = False
        self.grad_hooks.renew_accumulators(seated)

    def guard(self, answer: Answer) -> None:
        """Let `answer` compute the result of each use of an idle parameter."""
        kinds = {type(param) for unit in self.units for param in unit.params}
        guarded = {kind: new_guarded_class(kind, answer) for kind in kinds}
        for unit in self.units:
            unit.guard.arm([guarded[type(param)] for param in unit.params])
            if not unit.is_unsharded:
                unit.guard.hide()
        self._resting = [unit for unit in self.units if unit.is_always_unsharded]
        self.hide_idle_units()

    def hide_idle_units(self) -> None:
        """Let always unsharded parameters notice uses outside of forward and backward."""
        for unit in self._resting:
            unit.guard.hide()

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            self.grad_hooks.release_accumulators()

    def zero_grads(self, number: int | None = None) -> None:
        """Start or repeat a step: forget all gradients and any unfinished backward."""
        self._batch = _MicroBatch()
        self._compute_marks.forget()
        self._captured_grads.forget()
        self.grad_hooks.hold_accumulators(self.units)
        self._saved_views.begin_step(self.gathers.viewed)
        self._announce_fusion()
        super().zero_grads(number)

    def _announce_fusion(self) -> None:
        """Tell units whether layers may overwrite: not if the last step called them twice."""
        for unit in self.units if self._fuses_grads else ():
            if unit.is_trained:
                can_overwrite = not unit.reduces_in_place and unit not in self._reduce_last
                unit.fuse_grads(overwrites=self.step > 0 and can_overwrite)

    # ---- called by the hooks, in the order of a micro-batch

    def begin_forward(self) -> None:
        """Begin a micro-batch, or a recomputation within backward: the root is called."""
        if not self._batch.in_backward and not any(self._batch.depth.values()):
            self._batch.calls.clear()
            self._batch.depth.clear()
            self._batch.read_within.clear()
            self._batch.kind = "training" if torch.is_grad_enabled() else "evaluation"
            if not torch.is_grad_enabled():
                self.gathers.begin_evaluation()

    def end_forward(self) -> None:
        if not self._batch.in_backward and not torch.is_grad_enabled():
            self.hide_idle_units()

    @property
    def is_in_region(self) -> bool:
        """Whether a manual region runs, which reports its backward itself."""
        return self._batch.region is not None

    @contextmanager
    def region_forward(self, units: list[HZPUnit]) -> Generator[None]:
        self._batch.region = frozenset(units)
        try:
            self.before_forward(units)
            yield
        finally:
            self.after_forward(units)
            self._batch.region = None

    @contextmanager
    def region_backward(self, units: list[HZPUnit]) -> Generator[None]:
        batch = self._batch
        batch.region, batch.in_backward = frozenset(units), True
        try:
            for unit in units:
                self._unshard(unit)  # it may recompute an earlier region
            self._compute_marks.begin("backward", units)
            yield
            self._compute_marks.end("backward", units)
            for unit in units:
                self._reshard(unit)
        finally:
            batch.region, batch.in_backward = None, False

    def complete(self, units: list[HZPUnit]) -> None:
        for unit in units:
            self._captured_grads.give(unit)
            self._reduce(unit)

    def before_forward(self, units: list[HZPUnit]) -> None:
        # after_forward undoes this, so it comes before anything that can fail.
        self._has_pushed.append(False)
        batch = self._batch
        for unit in units:
            batch.depth[unit] = batch.depth.get(unit, 0) + 1
        if self.is_rehearsing or (self.driver.device.is_capturing() and not self.driver.in_graph):
            named = ", ".join(unit.name for unit in units) or "the model"
            raise ConfigurationError(
                f"{named} is called while a CUDA graph is captured: {NO_GRAPHS}"
            )
        self.check_usable()
        self.barrier_on_kind_change(self._batch.kind)
        if torch.is_grad_enabled():
            self.state = StepState.COLLECTING
        for unit in units:
            unit.check_called_in_fp8()
            if batch.region is not None and unit not in batch.region:
                raise RuntimeError(
                    f"{unit.name} is called in a manual region that does not name it; name it there"
                )
            if not batch.in_backward:
                calls = batch.calls[unit] = batch.calls.get(unit, 0) + 1
                if calls > 1:
                    self._note_second_call(unit)
            # A layer that is recomputed may quantise for its backward, too.
            self._unshard(unit, None if batch.in_backward else Direction.FORWARD)
        if self._saved_views.are_needed_by(units):
            self._saved_views.push()
            self._has_pushed[-1] = True
        self._compute_marks.begin("forward", units)

    def _note_second_call(self, unit: HZPUnit) -> None:
        """Reduce the unit at the end of backward, which reaches its first call last."""
        if unit.overwrites_main_grads:
            raise RuntimeError(
                f"{unit.name} is called twice in a forward of step {self.step} and was not in the "
                "step before: its fused weight gradients would be lost; add "
                "--no-gradient-accumulation-fusion"
            )
        self._reduce_last.add(unit)

    def after_forward(self, units: list[HZPUnit]) -> None:
        if self._has_pushed.pop():
            self._saved_views.pop()
        if self.driver.has_failed():
            return  # the error of the call is that failure
        self._compute_marks.end("forward", units)
        for unit in units:
            self._batch.depth[unit] -= 1
            # A recomputation in backward is followed by that unit's backward: keep it gathered.
            if self._batch.depth[unit] == 0 and not self._batch.in_backward:
                is_whole = unit.is_always_unsharded
                pointer = 0 if is_whole else unit.full_param_storage.untyped_storage().data_ptr()
                self._reshard(unit, has_computed=True)
                if unit in self.gathers.viewed and pointer:
                    modules = [module for module, own in self._units_of.items() if unit in own]
                    check_kept_views(unit.name, pointer, self._root, modules)

    def before_backward(self, units: list[HZPUnit]) -> None:
        """Unshard `units`: a gradient has reached an output of their module."""
        if torch.is_grad_enabled():
            # This backward builds a graph (of a gradient's norm), whose own backward may read any
            # parameter again.
            self.gathers.stop_early_sends()
        if self._is_within_forward:
            for unit in units:
                self._read_within(unit)
            return
        self._begin_backward()
        for unit in units:
            self._batch.started_backward.add(unit)
            self._unshard(unit, Direction.BACKWARD)
            if unit.overwrites_main_grads is not None:
                self.reductions.provide(unit)
            self._captured_grads.begin(unit)
        self._compute_marks.begin("backward", units)

    def _begin_backward(self) -> None:
        if not self._batch.in_backward:
            self._batch.in_backward = True
            for unit in self._resting:
                unit.guard.reveal()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # pyright: ignore[reportPrivateUsage]

    @property
    def _is_within_forward(self) -> bool:
        """Whether a module in its forward has called backward (forces are gradients of an energy).

        [Note: backward within a forward] Units that compute stay unsharded, other units that are
        read are resharded at the end, and nothing is reduced. The backward of the result follows.
        """
        return bool(self._has_pushed) and not self._batch.in_backward

    def _read_within(self, unit: HZPUnit) -> None:
        if unit not in self._batch.read_within:
            self._batch.read_within.add(unit)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_within)  # pyright: ignore[reportPrivateUsage]
        self._unshard(unit)

    def _end_within(self) -> None:
        for unit in self._batch.read_within:
            if not self._batch.depth.get(unit):
                self._reshard(unit)
        self._batch.read_within.clear()

    def _unshard_saved(self, unit: HZPUnit) -> None:
        """Unshard `unit` to read a saved view, perhaps before any known output has a gradient."""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            if self._is_within_forward:
                self._read_within(unit)
                return
            self._begin_backward()
            self._unshard(unit, Direction.BACKWARD)
        else:
            self._unshard(unit)

    def after_backward(self, units: list[HZPUnit]) -> None:
        if self._is_within_forward:
            return
        self._begin_backward()
        self._compute_marks.end("backward", units)
        for unit in (unit for unit in units if not self._batch.depth.get(unit)):
            self._reshard(unit)
            if unit in self._batch.reduced:
                # A backward of several forwards: autograd sums their gradients of a parameter.
                self._reduce_last.add(unit)
            if unit not in self._reduce_last:
                self._captured_grads.take(unit)
                self._reduce(unit)

    def end_backward(self) -> None:
        """Reduce the remaining units, in unit order: autograd has ended this micro-batch."""
        self._compute_marks.end("backward", self.units)
        for unit in self.units:
            self._captured_grads.take(unit)
            if unit in self._batch.started_backward or self.reductions.has_pending(unit):
                self._reduce(unit)
            self._reshard(unit)
        self._batch.started_backward.clear()
        self._batch.reduced.clear()
        self._batch.in_backward = False
        self.hide_idle_units()

    def _unshard(self, unit: HZPUnit, direction: Direction | None = None) -> None:
        if unit.is_always_unsharded:
            unit.guard.reveal()  # not earlier: a use outside of calls must first update it
        # Tensors that are made here outlive an inference mode, which would mark them.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            with _without_modes():
                self.gathers.unshard(unit, direction)
                self.sent_check.check_unwritten(unit)
        self._saved_views.track(unit)

    def _reshard(self, unit: HZPUnit, has_computed: bool = False) -> None:
        with _without_modes() if unit.is_unsharded else _NOTHING:
            if has_computed:
                self.sent_check.check_unwritten_in_use(unit)
            self.gathers.reshard(unit)

    def _reduce(self, unit: HZPUnit) -> None:
        with _without_modes():
            self.reduce(unit)
        self._batch.reduced.add(unit)
        self._batch.started_backward.discard(unit)


# ---- hooks


def _identity(hook: Any) -> Any:
    return hook


@contextmanager
def _outside_modes() -> Generator[None]:
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def _without_modes() -> AbstractContextManager[None]:
    """Hide the engine's operations from modes (checkpointing, counters) and torch.func."""
    has_modes = torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    return _outside_modes() if has_modes or is_transformed else _NOTHING
