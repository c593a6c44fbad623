# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where a model and autograd meet the engine: module and gradient hooks, and the state of the
micro-batch that runs.
"""

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.timeline import COMPUTE
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.in_flight import LARGE_GRAD_NBYTES
from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.zero.calls import attach_call_hooks, called, hooks_of_call, wrap_calls
from megatron_asynchzp.zero.captured_grads import CapturedGrads
from megatron_asynchzp.zero.construction import Construction
from megatron_asynchzp.zero.guard import NO_GRAPHS, Answer, new_guarded_class
from megatron_asynchzp.zero.part import Part
from megatron_asynchzp.zero.plan import UnitPlan
from megatron_asynchzp.zero.saved_views import SavedViews
from megatron_asynchzp.zero.step import KeepBudgets, StepScheduler, StepState
from megatron_asynchzp.zero.tensors_within import memory_of, tensors_kept
from megatron_asynchzp.zero.unit import HZPUnit

_NOTHING = nullcontext()
_Units = Sequence[HZPUnit]


@dataclass
class _MicroBatch:
    """The forward and backward that run now.

    kind: see StepScheduler.meet;
    calls: of a unit's modules in this forward; depth: how many of them have not returned;
    started_backward: units whose gradients are not on their way yet; reduced: those whose gradients
    are, in this backward; read_within: see [Note: backward within a forward]; part: units of the
    part that runs, None outside of parts; compute_marks: when the computation of (direction, unit)
    began, for a captured trace.
    """

    in_backward: bool = False
    part: frozenset[HZPUnit] | None = None
    kind: str = "training"
    calls: dict[HZPUnit, int] = field(default_factory=dict[HZPUnit, int])
    depth: dict[HZPUnit, int] = field(default_factory=dict[HZPUnit, int])
    started_backward: set[HZPUnit] = field(default_factory=set[HZPUnit])
    reduced: set[HZPUnit] = field(default_factory=set[HZPUnit])
    read_within: set[HZPUnit] = field(default_factory=set[HZPUnit])
    compute_marks: dict[tuple[str, HZPUnit], Any] = field(
        default_factory=dict[tuple[str, HZPUnit], Any]
    )


class HZPRuntime(StepScheduler):
    """The sharded engine around one module (a model chunk): its hooks run the step.

        forward    unit:  unshard | compute | reshard
        backward   unit:  unshard | compute | reshard, reduce gradients (G axes)
        last one   unit:  and then G to O and over the replicas
        step       all:   sync_grads (wait) | optimizer | sync_params (O to P)

    root: the module whose call is one forward.
    plans: a partition of its parameters.
    groups: communicators by group key of the plans.
    construction: under which `root` was built, if its modules are sharded already.
    fuses_grads: whether layers write weight gradients to main_grad themselves ([Note: fused
        gradients]); is_any_model: whether modules may be of any form, so that torch.compile may
        trace their calls, which leaves out the hooks, and backward may begin in their midst
        ([Note: saved views]); the rest is as in StepScheduler.
    """

    def __init__(
        self,
        root: nn.Module,
        plans: Sequence[UnitPlan],
        groups: dict[str, ShardGroups],
        schedule: ScheduleConfig = ScheduleConfig(),
        driver: Driver | None = None,
        grad_scale: float = 1.0,
        construction: Construction | None = None,
        fuses_grads: bool = False,
        budgets: KeepBudgets | None = None,
        is_any_model: bool = False,
    ):
        self._fuses_grads = fuses_grads
        self._around: Callable[[Any], Any] = torch.compiler.disable if is_any_model else _as_it_is  # pyright: ignore[reportUnknownMemberType]
        self.group_keys: dict[HZPUnit, str] = {}
        self._saved_views = SavedViews(self._unshard_saved, may_go_without=not is_any_model)
        self._has_pushed: list[bool] = []
        self._batch = _MicroBatch()
        self._reduce_last: set[HZPUnit] = set()
        self._handles: list[RemovableHandle | SimpleNamespace] = []
        self.is_rehearsing = False
        self._captured_grads = CapturedGrads()
        self._resting: list[HZPUnit] = []
        self._takers: dict[nn.Parameter, RemovableHandle] = {}
        self._accumulators: list[Any] = []
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
            # Layers write to the whole gradient of a unit; a graph, over the one that it gave last.
            largest = max(unit.layout.padded_numel for unit in self.group_keys)
            schedule = replace(schedule, grad_slot_nbytes=FP32_NBYTES * largest)
        super().__init__(list(self.group_keys), schedule, driver, grad_scale, budgets)
        self._root, self._units_of = root, units_of
        self._attach(root, units_of)

    def _attach(self, root: nn.Module, units_of: dict[nn.Module, list[HZPUnit]]) -> None:
        # The hooks are owned by the model, the runtime by the wrapper: a proxy breaks the cycle.
        runtime = weakref.proxy(self)
        # Registered before the units' own hooks and prepended after them: runs first.
        captured = [module for module, units in units_of.items() if any(u.is_seated for u in units)]
        # Megatron refuses hooks of torch within a layer that it captures by itself.
        within = {part for module in captured for part in module.modules()}
        for module, units in units_of.items():
            if module in within:
                self._handles.append(wrap_calls(module, units, runtime))
            else:
                self._handles += attach_call_hooks(module, units, runtime, self._around)

        def begin_forward(_root: nn.Module, _args: object) -> None:
            runtime.begin_forward()

        def end_forward(_root: nn.Module, _args: object, _output: object) -> None:
            runtime.end_forward()

        self._handles.append(
            root.register_forward_pre_hook(self._around(begin_forward), prepend=True)
        )
        end = self._around(end_forward)
        self._handles.append(root.register_forward_hook(end, always_call=True))
        for unit in self.units:
            is_shared = unit in self._reduce_last
            self._takers |= _attach_grad_hooks(unit, runtime, takes_all=is_shared)
        self._handles += self._takers.values()

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a call of the method `name` of `module` be a call of the module, as torch's
        register_fsdp_forward_method does."""
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

    def part(self, units: _Units, completes: _Units = (), recomputed: _Units = ()) -> Part:
        """A part of the model's work that is run by hand, instead of by a call of its modules.

        units: whose parameters it reads, in forward or in backward.
        completes: those of them to whose gradients nothing adds after its backward.
        recomputed: with which its backward computes again what an earlier part has made.
        """
        if self._fuses_grads:
            raise RuntimeError("layers that write to main_grad cannot be run in parts")
        return Part(weakref.proxy(self), list(units), list(completes), list(recomputed))

    @contextmanager
    def rehearsing(self, leaving_grads: Collection[nn.Parameter] = ()) -> Generator[None]:
        """Around the capture of CUDA graphs of the modules whose units have a seat, after the
        gradients of a step or between two: calls belong to no step, and compute with parameters of
        zeros. Collective.

        leaving_grads: at the end, the parameters whose gradients the captured backwards add to
            main_grad, instead of giving them to autograd.
        """
        self.settle()
        seated = [unit for unit in self.units if unit.is_seated]
        self._accumulators.clear()
        for unit in seated:
            unit.renew_accumulators()
        with self.gathers.rehearsing(), self._captured_grads.rehearsing(seated, leaving_grads):
            self.is_rehearsing = True
            try:
                yield
            finally:
                self.is_rehearsing = False
        for unit in seated:
            unit.renew_accumulators()

    def take_grads(self, unit: HZPUnit, index: int) -> None:
        """Autograd has given a parameter of `unit` its gradient."""
        if not self.is_rehearsing:
            self.reductions.take(unit, (index,))

    def take_last(self, param: nn.Parameter) -> None:
        """Let those who have hooked the gradient of `param` since find it there."""
        if (taker := self._takers.get(param)) is not None:
            hooks = cast("Any", param)._post_accumulate_grad_hooks
            hooks[taker.id] = hooks.pop(taker.id)  # torch's order is that of a dict

    def guard(self, answer: Answer) -> None:
        """From now on `answer` is asked for the result of what uses a parameter that is not
        gathered, or where it always is, between a backward and the next forward."""
        kinds = {type(param) for unit in self.units for param in unit.params}
        guarded = {kind: new_guarded_class(kind, answer) for kind in kinds}
        for unit in self.units:
            unit.guard([guarded[type(param)] for param in unit.params])
        self._resting = [unit for unit in self.units if unit.is_always_unsharded]
        self.rest()

    def rest(self) -> None:
        """No forward or backward is under way."""
        for unit in self._resting:
            unit.hide()

    def detach(self) -> None:
        """Close and remove every hook; the parameters stay sharded."""
        try:
            self.close()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._accumulators.clear()

    def zero_grads(self, number: int | None = None) -> None:
        """Start a step, or start it again: forget all gradients and any unfinished backward.

        number: see StepScheduler.zero_grads.
        """
        self._batch = _MicroBatch()
        self._captured_grads.forget()
        if not self._accumulators:
            self._accumulators = [node for unit in self.units for node in _accumulators_of(unit)]
        self._saved_views.begin_step(self.gathers.viewed)
        self._announce_fusion()
        super().zero_grads(number)

    def _announce_fusion(self) -> None:
        """Tell units whether their layers may overwrite, as the step before has shown: not those
        that are called twice in a forward, whose gradients add up."""
        for unit in self.units if self._fuses_grads else ():
            if unit.is_trained:
                can_overwrite = not unit.reduces_in_place and unit not in self._reduce_last
                unit.fuse_grads(overwrites=self.step > 0 and can_overwrite)

    # ---- called by the hooks, in the order of one micro-batch

    def begin_forward(self) -> None:
        """The root is called: a new micro-batch, or a recomputation within backward."""
        if not self._batch.in_backward and not any(self._batch.depth.values()):
            self._batch.calls.clear()
            self._batch.depth.clear()
            self._batch.read_within.clear()
            self._batch.kind = "training" if torch.is_grad_enabled() else "evaluation"
            if not torch.is_grad_enabled():
                self.gathers.begin_evaluation()

    def end_forward(self) -> None:
        """The call of the root has returned, or raised an error."""
        if not self._batch.in_backward and not torch.is_grad_enabled():
            self.rest()

    @property
    def is_in_part(self) -> bool:
        """Whether a part runs, which says itself when its backward begins and is done."""
        return self._batch.part is not None

    @contextmanager
    def part_forward(self, units: list[HZPUnit]) -> Generator[None]:
        """Around the forward of a part that needs `units`."""
        self._batch.part = frozenset(units)
        try:
            self.before_forward(units)
            yield
        finally:
            self.after_forward(units)
            self._batch.part = None

    @contextmanager
    def part_backward(self, units: list[HZPUnit]) -> Generator[None]:
        """Around the backward of a part that needs `units`."""
        batch = self._batch
        batch.part, batch.in_backward = frozenset(units), True
        try:
            for unit in units:
                self._unshard(unit)
            self._mark_compute("backward", units)
            yield
            self._note_compute("backward", units)
            for unit in units:
                self._reshard(unit)
        finally:
            batch.part, batch.in_backward = None, False

    def complete(self, units: list[HZPUnit]) -> None:
        """Nothing adds to the gradients of `units` any more, in this micro-batch."""
        for unit in units:
            self._captured_grads.give(unit)
            self._reduce(unit)

    def before_forward(self, units: list[HZPUnit]) -> None:
        """A module that needs `units` is called."""
        # First what after_forward undoes, then what can fail.
        self._has_pushed.append(False)
        batch = self._batch
        for unit in units:
            batch.depth[unit] = batch.depth.get(unit, 0) + 1
        if self.is_rehearsing or self.driver.device.is_capturing():
            named = ", ".join(unit.name for unit in units) or "the model"
            raise ConfigurationError(
                f"{named} is called while a CUDA graph is captured: {NO_GRAPHS}"
            )
        self.refuse_use()
        self.meet(self._batch.kind)
        if torch.is_grad_enabled():
            self.state = StepState.COLLECTING
        for unit in units:
            unit.refuse_other_grid()
            if batch.part is not None and unit not in batch.part:
                raise RuntimeError(f"{unit.name} is called in a part that does not name it")
            if not batch.in_backward:
                calls = batch.calls[unit] = batch.calls.get(unit, 0) + 1
                if calls > 1:
                    self._note_second_call(unit)
            self._unshard(unit)
        if self._saved_views.are_needed_by(units):
            self._saved_views.push()
            self._has_pushed[-1] = True
        self._mark_compute("forward", units)

    def _note_second_call(self, unit: HZPUnit) -> None:
        """Its gradient is complete with that of the first call, the last one of backward."""
        if unit.overwrites_main_grads:
            raise RuntimeError(
                f"{unit.name} is called twice in a forward of step {self.step} and was not in the "
                "step before: its fused weight gradients would be lost; add "
                "--no-gradient-accumulation-fusion"
            )
        self._reduce_last.add(unit)

    def after_forward(self, units: list[HZPUnit]) -> None:
        """The call has returned, or raised an error."""
        if self._has_pushed.pop():
            self._saved_views.pop()
        if self.driver.has_failed():
            return  # the error of the call is that failure
        self._note_compute("forward", units)
        for unit in units:
            self._batch.depth[unit] -= 1
            # A recomputation in backward is followed by that unit's backward: keep it gathered.
            if self._batch.depth[unit] == 0 and not self._batch.in_backward:
                is_whole = unit.is_always_unsharded
                pointer = 0 if is_whole else unit.full_param_storage.untyped_storage().data_ptr()
                self._reshard(unit, has_computed=True)
                if unit in self.gathers.viewed and pointer:
                    self._refuse_kept_views(unit, pointer)

    def _refuse_kept_views(self, unit: HZPUnit, place: int) -> None:
        """Raise ConfigurationError where a module of `unit`, or the root itself, keeps a view of
        the parameters that were gathered at `place`: the next update would not reach it."""
        users = [module for module, units in self._units_of.items() if unit in units]
        parts = {part for user in users for part in user.modules()} | {self._root}
        modules: dict[str, nn.Module] = dict(self._root.named_modules())  # pyright: ignore[reportUnknownArgumentType]
        named = {name: part for name, part in modules.items() if part in parts}
        for path, tensor in tensors_kept(named):
            memory = None if isinstance(tensor, nn.Parameter) else memory_of(tensor)
            if memory is not None and memory[0] == place:
                raise ConfigurationError(
                    f"{path} keeps a view of parameters of {unit.name} after forward, and would "
                    "keep their values of now: make it in each forward, or let it be a clone()"
                )

    def before_backward(self, units: list[HZPUnit]) -> None:
        """A gradient has reached an output of the module of `units`."""
        if torch.is_grad_enabled():
            # A backward that builds a graph (that of a gradient's norm): the backward of that graph
            # reads parameters again, where it likes.
            self.gathers.stop_early_sends()
        if self._is_within_forward:
            for unit in units:
                self._read_within(unit)
            return
        self._begin_backward()
        for unit in units:
            self._batch.started_backward.add(unit)
            self._unshard(unit)
            if unit.overwrites_main_grads is not None:
                self.reductions.provide(unit)
            self._captured_grads.begin(unit)
        self._mark_compute("backward", units)

    def _begin_backward(self) -> None:
        if not self._batch.in_backward:
            self._batch.in_backward = True
            for unit in self._resting:
                unit.unhide()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # pyright: ignore[reportPrivateUsage]

    @property
    def _is_within_forward(self) -> bool:
        """[Note: backward within a forward] A module asks for gradients in its forward (forces are
        those of an energy), and goes on to compute: what computes stays gathered, what else is read
        is dropped at the end, and nothing is reduced. The backward of what comes of it follows."""
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
        """Unshard `unit` where a saved view is read, maybe before a gradient is at an output that
        its module is known to have: its tensors may be hidden in an object, or kept elsewhere."""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            if self._is_within_forward:
                self._read_within(unit)
                return
            self._begin_backward()
        self._unshard(unit)

    def after_backward(self, units: list[HZPUnit]) -> None:
        """The backward of the module of `units` is done."""
        if self._is_within_forward:
            return
        self._begin_backward()
        self._note_compute("backward", units)
        for unit in (unit for unit in units if not self._batch.depth.get(unit)):
            self._reshard(unit)
            if unit in self._batch.reduced:
                # One backward of several forwards: autograd adds up what they give a parameter.
                self._reduce_last.add(unit)
            if unit not in self._reduce_last:
                self._captured_grads.take(unit)
                self._reduce(unit)

    def end_backward(self) -> None:
        """Autograd is done with this micro-batch: reduce the remaining units, in unit order."""
        self._note_compute("backward", self.units)
        for unit in self.units:
            self._captured_grads.take(unit)
            if unit in self._batch.started_backward or self.reductions.has_pending(unit):
                self._reduce(unit)
            self._reshard(unit)
        self._batch.started_backward.clear()
        self._batch.reduced.clear()
        self._batch.in_backward = False
        self.rest()

    def _unshard(self, unit: HZPUnit) -> None:
        if unit.is_always_unsharded:
            unit.unhide()  # and not before: who uses it without a call gets it up to date
        # What is made here outlives an inference mode, which would mark it.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            with _without_modes():
                self.gathers.unshard(unit)
                self.refuse_write(unit)
        self._saved_views.track(unit)

    def _reshard(self, unit: HZPUnit, has_computed: bool = False) -> None:
        with _without_modes() if unit.is_unsharded else _NOTHING:
            if has_computed:
                self.refuse_write_in_use(unit)
            self.gathers.reshard(unit)

    def _reduce(self, unit: HZPUnit) -> None:
        with _without_modes():
            self.reduce(unit)
        self._batch.reduced.add(unit)
        self._batch.started_backward.discard(unit)

    def _mark_compute(self, direction: str, units: list[HZPUnit]) -> None:
        timeline = self.driver.timeline
        if timeline.is_capturing:
            for unit in units:
                self._batch.compute_marks.setdefault((direction, unit), timeline.device.mark())

    def _note_compute(self, direction: str, units: list[HZPUnit]) -> None:
        """The computation of this direction with `units` has ended, in a captured trace."""
        if not self._batch.compute_marks:
            return
        timeline = self.driver.timeline
        for unit in units:
            start = self._batch.compute_marks.pop((direction, unit), None)
            if start is not None:
                timeline.note(COMPUTE, f"{direction} {unit.name}", start)


# ---- hooks


def _as_it_is(hook: Any) -> Any:
    return hook


@contextmanager
def _apart() -> Generator[None]:
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def _without_modes() -> AbstractContextManager[None]:
    """Around the engine's own operations: modes of the model (selective checkpointing, a counter of
    operations) would keep their results, or count them, and torch.func's would wrap them."""
    has_modes = torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    return _apart() if has_modes or is_transformed else _NOTHING


def _attach_grad_hooks(
    unit: HZPUnit, runtime: HZPRuntime, takes_all: bool
) -> dict[nn.Parameter, RemovableHandle]:
    """Take the gradient of every large parameter of `unit` as soon as it is complete, so that
    another one is added in fp32; small ones are taken together when the unit is reduced.

    takes_all: the small ones too: gradients come from several modules.
    """

    def hook_of(index: int) -> Callable[[torch.Tensor], None]:
        return lambda _param: runtime.take_grads(unit, index)

    return {
        param: param.register_post_accumulate_grad_hook(hook_of(index))  # pyright: ignore[reportUnknownMemberType]
        for index, param in enumerate(unit.params)
        if param.requires_grad and (takes_all or param.nbytes >= LARGE_GRAD_NBYTES)
    }


def _accumulators_of(unit: HZPUnit) -> list[Any]:
    """The nodes that accumulate the gradients of `unit`.

    [Note: side streams] Autograd runs such a node on the stream on which it was made, after
    whatever stream made the gradient. Made when the first step begins (Megatron wraps a model on
    another stream) and kept, they are those of the stream that computes; so a module may compute
    its gradients elsewhere, as Megatron's shared experts do.
    """
    trained = [param for param in unit.params if param.requires_grad]
    with unit.own_uses():
        return [torch.autograd.graph.get_gradient_edge(param).node for param in trained]
