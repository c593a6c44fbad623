# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine around a torch module: what a plain training loop needs, in one object."""

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.report import CommReport, CommReports
from megatron_asynchzp.comm.timeline import captured_trace, profiler_range
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.meta_model import is_meta, materialize
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharded_arguments import (
    Description,
    checked_group,
    checked_optimizer,
    checked_units,
    default_sizes,
    default_units,
    describe,
    refuse_arguments,
    refuse_different_models,
    refuse_param_dtype,
    refuse_sharded,
    sizes_of_mesh,
)
from megatron_asynchzp.sharded_params import ShardedParams, refuse_copies
from megatron_asynchzp.sharded_state import ShardedState
from megatron_asynchzp.sharding.topology import Range, ShardSizes, ShardTopology
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.construction import Construction
from megatron_asynchzp.zero.early_update import EarlyUpdate, is_elementwise
from megatron_asynchzp.zero.guard import SHARDED_AS
from megatron_asynchzp.zero.params import refuse_params, refuse_shared_memory
from megatron_asynchzp.zero.plan import plan_units
from megatron_asynchzp.zero.unit import HZPUnit

NewOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer of (name, parameter) pairs, as torch's optimizers take them."""


def shard(
    model: nn.Module,
    units: Iterable[nn.Module] | None = None,
    sizes: ShardSizes | DeviceMesh | None = None,
    optimizer: NewOptimizer | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    schedule: ScheduleConfig = ScheduleConfig(),
    param_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> "ShardedModel":
    """Shard `model` over the ranks of `group` and return what a training loop needs beside it.

    Afterwards each call of `model` gathers the parameters of its units ahead of their use, and each
    backward reduces their gradients, beside the computation (AsyncHZP, arXiv 2510.20111). The model
    must be the same on all ranks of the group. Collective over the world.

    units: modules whose parameters are gathered together (usually the layers); what is in none of
        them is a unit of its own. A parameter that several modules share (tied weights) is found
        and becomes a unit too. Where None, the members of the outermost ModuleLists and Sequentials
        of whose class there are several.
    sizes: ranks that share one copy of parameters, gradients and optimizer states. Where None, the
        ranks of a node (torchrun's LOCAL_WORLD_SIZE), of a node, and all. A mesh of all ranks with
        one dimension is ZeRO-3, one with two (replicate, shard) is HSDP.
    optimizer: called with the name and this rank's part of each trained parameter, which is 1-D,
        fp32 and possibly empty; for example `lambda params: torch.optim.AdamW(params, lr=1e-3)`.
    group: the default group where None.
    param_dtype: torch.bfloat16 or float16: parameters are gathered and computed with in it, and
        fp32 inputs of the model and of its units are cast to it; the fp32 main parameters start
        from the fp32 values that the model has. None: the dtypes that the model has.
    device: where a model on the meta device gets its values, from the reset_parameters() of its
        modules, of which no rank holds more than a unit at a time beside its part. None: torch's
        accelerator, or the CPU without one.

    Raises ConfigurationError for sizes that do not nest or do not divide the group, and for a
    parameter that cannot be sharded.
    """
    unit_modules = _checked_units(model, default_units(model) if units is None else units, True)
    new_optimizer = checked_optimizer(optimizer)
    group = checked_group(group)
    if isinstance(sizes, DeviceMesh):
        sizes = sizes_of_mesh(sizes)
    sizes = default_sizes(group.size()) if sizes is None else sizes
    refuse_arguments(sizes, schedule)
    refuse_param_dtype(param_dtype, model)
    _watch_optimizers()
    where = torch.device(device) if device is not None else _usual_device()
    runtime = _runtime_of(model, unit_modules, sizes, group, schedule, where, param_dtype)
    return ShardedModel(model, runtime, new_optimizer, group)


def _usual_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def new_runtime(
    model: nn.Module,
    units: Iterable[nn.Module],
    sizes: ShardSizes,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    schedule: ScheduleConfig = ScheduleConfig(),
) -> HZPRuntime:
    """The engine around `model` without an optimizer; as `shard`, but for a model with values."""
    unit_modules = _checked_units(model, units, False)
    return _runtime_of(model, unit_modules, sizes, checked_group(group), schedule)


def _checked_units(
    model: nn.Module, units: Iterable[nn.Module], allows_meta: bool
) -> list[nn.Module]:
    """All that can be said without a process group."""
    unit_modules = checked_units(model, units)
    refuse_sharded(model)
    refuse_params(model, allows_meta)
    if not is_meta(model):
        refuse_shared_memory(model)
    return unit_modules


def _runtime_of(
    model: nn.Module,
    unit_modules: list[nn.Module],
    sizes: ShardSizes,
    group: dist.ProcessGroup,
    schedule: ScheduleConfig,
    device: torch.device = torch.device("cpu"),
    param_dtype: torch.dtype | None = None,
) -> HZPRuntime:
    construction = None
    if not is_meta(model):
        refuse_different_models(model, group)
    ranks = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), ranks.index(dist.get_rank()), sizes)
    groups = ShardGroups.create(topology, ranks, timedelta(seconds=schedule.time_limit_s))
    all_groups = {"dense": groups}
    if is_meta(model):
        construction = _construct(model, unit_modules, all_groups, group, device)
    whole = {} if param_dtype is None else _cast_params(model, unit_modules, param_dtype)
    plans = plan_units(model, unit_modules, also_used_by=_find_shared_params(model))
    runtime = HZPRuntime(
        model,
        plans,
        all_groups,
        schedule,
        grad_scale=1.0 / len(ranks),
        construction=construction,
        is_compiled=True,
    )
    if construction is not None:
        construction.close()
    for unit in runtime.units:
        _restore_main_params(unit, whole)
    return runtime


def _construct(
    model: nn.Module,
    unit_modules: list[nn.Module],
    groups: dict[str, ShardGroups],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Construction:
    """Give a model on the meta device its values, of which this rank keeps its part."""
    seen: dict[nn.Parameter, Description] = {}

    def note(param: nn.Parameter) -> None:
        seen[param] = describe(param)

    construction = Construction(groups, prepare=note)

    def cut(unit: nn.Module) -> None:
        construction.shard(unit, alone=_find_shared_params(model))

    materialize(model, unit_modules, device, cut)
    refuse_different_models(model, group, seen)
    return construction


def _cast_params(
    model: nn.Module, unit_modules: list[nn.Module], dtype: torch.dtype
) -> dict[nn.Parameter, torch.Tensor]:
    """Let the floating-point parameters of `model`, and what it and its units are called with, be
    of `dtype`. Returns the values of those that are trained."""
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for param in model.parameters():
        if param.requires_grad:
            whole[param] = param.detach()
        param.data = param.detach().to(dtype)

    def cast(value: Any) -> Any:
        is_cast = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_cast else value

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for module in dict.fromkeys((model, *unit_modules)):
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    return whole


@torch.no_grad()
def _restore_main_params(unit: HZPUnit, whole: dict[nn.Parameter, torch.Tensor]) -> None:
    """Let the fp32 main parameters have the values that were there before they were rounded."""
    for index, param in enumerate(unit.params):
        if param in whole and unit.is_trained:
            held, main = unit.main_param.held_of(index)
            main.copy_(whole[param].reshape(-1)[held.start : held.stop])


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_other_optimizers)


def _find_shared_params(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Parameters with several names, and the modules of all names but the first."""
    modules: dict[nn.Parameter, list[nn.Module]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        modules.setdefault(param, []).append(model.get_submodule(name.rpartition(".")[0]))
    return {param: users[1:] for param, users in modules.items() if len(users) > 1}


@dataclass(frozen=True)
class _HeldFragment:
    """What this rank holds of one parameter.

    held: its elements, of the row-major parameter; values: 1-D, these elements of the fp32 main
    parameter where it is trained, else of the model's.
    """

    name: str
    shape: tuple[int, ...]
    held: Range
    values: torch.Tensor

    def state_of(self, values: torch.Tensor) -> ShardedState:
        """`values` (1-D, of the same elements) for a checkpoint."""
        return ShardedState(self.shape, self.held, values)


@dataclass(frozen=True)
class _TrainedFragment(_HeldFragment):
    """param: `values` for the optimizer; grad: its gradient, 1-D fp32; is_counted: whether sums
    over the ranks take this part from this rank, not from a replica of it."""

    unit: HZPUnit
    param: nn.Parameter
    grad: torch.Tensor
    is_counted: bool


def _fragments_of(unit: HZPUnit) -> Iterator[_HeldFragment]:
    buffer = unit.main_param if unit.is_trained else unit.model_param
    for index, piece in enumerate(unit.layout.slices):
        held, values = buffer.held_of(index)
        if not unit.is_trained:
            yield _HeldFragment(piece.name, piece.shape, held, values)
            continue
        param, grad = nn.Parameter(values), unit.main_grad_fragments()[index]
        param.grad = grad
        is_counted = unit.groups.topology.replica_index == 0
        yield _TrainedFragment(piece.name, piece.shape, held, values, unit, param, grad, is_counted)


class _AwaitedParam(nn.Parameter):
    """The class, for now, of an optimizer's parameter whose gradient is on its way: who reads it
    (a GradScaler, torch's clip_grad_norm_) waits for it."""

    await_grads: Callable[[bool], None]

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        reader = sys._getframe(1).f_globals.get("__name__")
        if reader == _WHOLE_STATES:
            _refuse_whole_states()
        function = sys._getframe(1).f_code.co_name
        if reader == "torch.nn.utils.clip_grad" and function != "clip_grad_value_":
            raise ConfigurationError(
                "torch's gradient clipping sees this rank's part alone; call "
                "sharded.clip_grad_norm_()"
            )
        # From then on `self` is a plain parameter. What else reads may do so on one rank alone.
        self.await_grads(reader == "torch.amp.grad_scaler")
        return self.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            raise ConfigurationError(
                "the gradients of a sharded model are collected elsewhere, and add up; forget them "
                "with zero_grad()"
            )
        self.await_grads(False)
        self.grad = value


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What torch's own state_dict would have of `model` beside its parameters."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            is_saved = name.rpartition(".")[2] not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if is_saved and buffer.numel():
                yield name, buffer


def _problem_of_values(
    named: list[tuple[str, torch.Tensor]], values: Mapping[str, torch.Tensor] | None
) -> str | None:
    """Why `values` are not those of the model."""
    if values is None:
        return "the source rank has no values; hand over the model's whole state_dict() there"
    shapes = {name: tensor.shape for name, tensor in named}
    for name, shape in shapes.items():
        if name not in values:
            return f"{name} is not among the values; hand over the model's whole state_dict()"
        if values[name].shape != shape:
            return (
                f"{name} has shape {tuple(values[name].shape)} there, {tuple(shape)} in the model"
            )
    return None


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Before a step of any optimizer of the process: its parameters are to have gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := getattr(param, SHARDED_AS, None)) is not None:
                raise ConfigurationError(
                    f"{name}: an optimizer of model.parameters() trains nothing of a sharded "
                    "model; hand shard() a function that makes it, as optimizer=lambda params: "
                    "torch.optim.AdamW(params, lr=1e-3), and step sharded.optimizer"
                )


_WHOLE_STATES = "torch.distributed.checkpoint.state_dict"
_HELD = "asynchzp_held"
"""Where an optimizer's state_dict() says of which elements it is: (parameter, start, stop)."""


def _refuse_whole_states(*_: object) -> None:
    """Before an optimizer's state_dict(): torch's get_state_dict looks for whole parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _WHOLE_STATES:
        frame = frame.f_back
    if frame is not None:
        raise ConfigurationError(
            "the optimizer of a sharded model has this rank's parts, which torch's functions for "
            "state dicts do not know; sharded.state_dict() has model and optimizer for "
            "torch.distributed.checkpoint"
        )


def _refuse_other_parts(state: Mapping[str, Any], held: list[tuple[str, int, int]]) -> None:
    """Before an optimizer's load_state_dict()."""
    found = [tuple(part) for part in state.get(_HELD, ())]
    if found != held:
        whose = "of another rank or other sizes" if found else "of a model that is not sharded"
        raise ConfigurationError(
            f"this state of the optimizer is {whose}: each rank has its own part; save "
            "sharded.state_dict() with torch.distributed.checkpoint, which loads into any sizes"
        )


def _refuse_new_group(_group: object) -> None:
    raise ConfigurationError(
        "add_param_group: the optimizer has the parameters that the model had when it was sharded; "
        "make all groups in the function that shard() gets"
    )


def _owner(sharded: "ShardedModel") -> "Callable[[], ShardedModel]":
    """Gives `sharded`, which it does not keep alive."""
    ref = weakref.ref(sharded)

    def owner() -> ShardedModel:
        found = ref()
        if found is None:
            raise ConfigurationError(
                "what shard() returned is gone; keep it as long as the model is trained, as in "
                "sharded = shard(...)"
            )
        return found

    return owner


def _close_at_exit(sharded: "weakref.ref[ShardedModel]") -> None:
    """A thread that still waits for a collective when the process is torn down would abort it.

    Where it ends with an error the other ranks may be gone."""
    open_one = sharded()
    if open_one is not None and not hasattr(sys, "last_exc"):
        with suppress(Exception):  # the collectives of a group that was destroyed
            open_one.close()


class ShardedModel:
    """A sharded model's step, gradient norm and checkpoint; made by `shard`.

        for batches in data:
            sharded.zero_grad()
            for index, batch in enumerate(batches):
                sharded.set_is_last_micro_batch(index == len(batches) - 1)
                loss_of(model, batch).backward()
            sharded.clip_grad_norm_(1.0)
            sharded.step()

    optimizer: over this rank's parts of the fp32 main parameters; learning rates are changed there.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: HZPRuntime,
        new_optimizer: NewOptimizer,
        group: dist.ProcessGroup | None,
    ):
        self.model, self.runtime = model, runtime
        self._device = runtime.units[0].device
        self._group = group
        owner = _owner(self)
        self._params = ShardedParams(model, runtime)
        self._params.bind(lambda: owner().zero_grad(), lambda: owner().no_sync())
        self._parts = [part for unit in runtime.units for part in _fragments_of(unit)]
        self._trained = [part for part in self._parts if isinstance(part, _TrainedFragment)]
        self.optimizer = self._new_optimizer(new_optimizer)
        self._makes_state = False
        self._states_on_device: dict[nn.Parameter, dict[str, Any]] = {}  # while it sleeps
        self.runtime.early = self._new_early_update()
        self._grads_seen: list[int] = []
        self._is_as_sent = False
        self._await_grads()
        self._reports = CommReports(runtime.driver)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _new_optimizer(self, new_optimizer: NewOptimizer) -> torch.optim.Optimizer:
        named = [(part.name, part.param) for part in self._trained]
        if not named:  # a reference or a teacher, which torch's optimizers refuse
            named = [("nothing", nn.Parameter(torch.zeros(0, device=self._device)))]
        optimizer = new_optimizer(named)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"optimizer returned a {type(optimizer).__name__}; it is to return an optimizer of "
                "torch, as lambda params: torch.optim.AdamW(params, lr=1e-3)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS calls the model within its step, with this rank's parameters alone; take an "
                "optimizer that needs gradients only, as torch.optim.AdamW"
            )
        known = {param for _, param in named}
        if any(param not in known for group in optimizer.param_groups for param in group["params"]):
            raise ConfigurationError(
                "the optimizer has parameters that shard() did not hand over; make it of the pairs "
                "that its function is called with, and another one for what is not in the model"
            )
        owner, attributes = _owner(self), cast("Any", optimizer)
        attributes.zero_grad = lambda set_to_none=True: owner().zero_grad()
        attributes.add_param_group = _refuse_new_group
        attributes.__reduce_ex__ = refuse_copies
        optimizer.register_step_pre_hook(lambda *call: owner()._before_update(*call))
        optimizer.register_step_post_hook(lambda *call: owner()._after_update())
        held = [(part.name, part.held.start, part.held.stop) for part in self._trained]
        optimizer.register_state_dict_pre_hook(_refuse_whole_states)
        optimizer.register_state_dict_post_hook(lambda _, state: state.update({_HELD: held}))
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: _refuse_other_parts(state, held)
        )
        optimizer.register_load_state_dict_pre_hook(lambda *_: owner().runtime.refuse_sleep())
        for part in self._trained:
            param: Any = part.param
            param.await_grads = lambda to_scaler: owner()._hand_out_grads(to_scaler)
        return optimizer

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ConfigurationError(
            "call the model that was sharded, as model(x), not what shard() returned"
        )

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        of_model = f"; the model has it: sharded.model.{name}" if hasattr(nn.Module, name) else ""
        raise AttributeError(f"a {kind} has no {name}{of_model}", name=name, obj=self)

    def _new_early_update(self) -> EarlyUpdate | None:
        schedule = self.runtime.schedule
        if not schedule.may_send_early or not self._trained:
            return None
        if is_elementwise(self.optimizer):
            params_of: dict[HZPUnit, list[nn.Parameter]] = {}
            for part in self._trained:
                params_of.setdefault(part.unit, []).append(part.param)
            return EarlyUpdate(self.optimizer, params_of, schedule.early_update == "on")
        if schedule.early_update == "on":
            raise ConfigurationError(
                f"early_update='on': {type(self.optimizer).__name__} is not known to update each "
                "element from that element alone; take torch.optim.AdamW, Adam or SGD, or leave "
                "early_update out"
            )
        return None

    # ---- one step

    def zero_grad(self) -> None:
        """Start a step: forget all gradients, and whatever an unfinished backward left. The same as
        `zero_grad` of the model or of the optimizer."""
        self.runtime.zero_grads()
        self.set_is_last_micro_batch(True)
        self._await_grads()

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Before each forward of a step with several micro-batches: whether it is the last one.

        The backward of the last one reduces what all of them added up. A step of one micro-batch
        does not need this.
        """
        self.runtime.is_last_micro_batch = is_last

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro-batches of a step but the last one, as with DistributedDataParallel: in
        place of set_is_last_micro_batch(). The model's attribute `no_sync` is the same."""
        self.set_is_last_micro_batch(False)
        try:
            yield
        finally:
            self.set_is_last_micro_batch(True)

    def _sync_grads(self) -> None:
        self.runtime.refuse_sleep()
        if not self.runtime.are_grads_synced:
            self._params.refuse_changes()
            self.runtime.sync_grads()
            self._grads_seen = self._grad_versions()
        for part in self._trained:
            param: Any = part.param
            if type(param) is not nn.Parameter:
                param.__class__ = nn.Parameter
                param.grad = part.grad

    def _await_grads(self) -> None:
        """The gradients are not complete: who reads one waits for it."""
        for part in self._trained:
            part.param.__class__ = _AwaitedParam

    @torch.no_grad()
    def _hand_out_grads(self, to_scaler: bool) -> None:
        """Somebody else reads gradients. A GradScaler leaves out a step in which one is not finite:
        where it is so on one rank it becomes so on all."""
        self._sync_grads()
        if not to_scaler:
            return
        grads = [part.grad for part in self._trained if part.grad.numel()]
        sums = [grad.sum() for grad in grads]
        total = torch.stack(sums).sum() if sums else torch.zeros((), device=self._device)
        is_finite = torch.isfinite(total).float()
        dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self._group)
        for grad in grads[:1]:
            grad[:1].add_(torch.where(is_finite > 0, 0.0, float("nan")))

    def _grad_versions(self) -> list[int]:
        """Numbers that torch raises whenever the gradients are written."""
        return [unit.main_grad.storage._version for unit in self.runtime.units if unit.is_trained]

    def _are_grads_complete(self) -> bool:
        """Whether the optimizer gets the gradients as the engine completed them."""
        is_written = self._grads_seen != self._grad_versions()
        is_other = any(part.param.grad is not part.grad for part in self._trained)
        # Another one of these comes after this.
        is_hooked = len(self.optimizer._optimizer_step_pre_hooks) > 1  # pyright: ignore
        return not (is_written or is_other or is_hooked)

    def _is_so_everywhere(self, mine: bool) -> bool:
        everywhere = torch.tensor(int(mine), device=self._device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        return bool(everywhere)

    def _before_update(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigurationError(
                "step() of a sharded model's optimizer takes no closure; call backward before it"
            )
        if not self._makes_state:
            self._sync_grads()
            if (early := self.runtime.early) is not None:
                is_complete = self._are_grads_complete()
                self._is_as_sent = early.decide(is_complete, self._is_so_everywhere)

    def _after_update(self) -> None:
        if not self._makes_state:
            self.runtime.sync_params(self._is_as_sent)
            self.runtime.rest()
            self._await_grads()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Returns the norm before that, a 0-dim fp32 tensor, the same on all ranks. Collective.
        """
        self._sync_grads()
        # Not part.grad: somebody may have put another one in its place.
        counted = [part.param.grad for part in self._trained if part.is_counted]
        norms = [
            torch.linalg.vector_norm(grad) for grad in counted if grad is not None and grad.numel()
        ]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        is_as_seen = self._grads_seen == self._grad_versions()
        for part in self._trained:
            if part.param.grad is not None:
                part.param.grad.mul_(scale)
        # Where nothing was sent early the host does not wait for it.
        if self.runtime.has_sent_early and is_as_seen and bool(scale == 1.0):
            self._grads_seen = self._grad_versions()
        return norm

    def step(self) -> None:
        """Apply the optimizer to this rank's parts and begin to rebuild the parameters. Collective.

        Gradients are the mean over the ranks of what each rank's micro-batches added up.
        """
        with profiler_range("optimizer"):
            self.optimizer.step()

    @contextmanager
    def changing_params(self) -> Iterator[None]:
        """Around writes to the values of the optimizer's parameters (an average of them is put in
        their place, say), from which the model's are rebuilt then. Collective."""
        self.runtime.refuse_sleep()
        self.runtime.settle()  # what is still read of them
        yield
        self.runtime.sync_params()
        self.runtime.rest()

    # ---- asleep

    def sleep(self, level: int = 1) -> None:
        """Between two steps: free memory of the device for something else, a rollout say. States
        go to pinned memory of the host in at most ten copies, and come back by `wake`, with the
        same bits. The memory in flight is freed.

        level: 1 for gradients and optimizer states, 2 for the parameter shards too, after which
            nothing of the engine is on the device.

        Until `wake` the model must not be called, nor the values of its optimizer's parameters be
        read; `state_dict` can be saved. Collective.

        Raises ConfigurationError within a step, and where it sleeps already.
        """
        if level not in (1, 2):
            raise ConfigurationError(f"sleep({level!r}): the level is 1, or 2 with the parameters")
        self.runtime.refuse_sleep()
        if not self.runtime.is_in_step:
            self.runtime.settle()
            self._create_optimizer_state()  # for a checkpoint that is saved meanwhile
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        states = [value for value in values if isinstance(value, torch.Tensor)]
        if other := [value for value in states if type(value) is not torch.Tensor]:
            raise ConfigurationError(
                f"sleep(): the optimizer's state has a {type(other[0]).__name__}, whose memory "
                "cannot be moved; take an optimizer whose states are plain tensors"
            )
        states = [value for value in states if value.device.type == self._device.type]
        copy = self.runtime.sleep(states, with_params=level == 2)
        for param, state in cast(
            "dict[nn.Parameter, dict[str, Any]]", self.optimizer.state
        ).items():
            self._states_on_device[param] = dict(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = copy.value_of(value)
        for part in self._trained:
            part.param.data = part.values[:0]  # reading what has no memory would end the process

    def wake(self) -> None:
        """Bring back what `sleep` took from the device. Collective.

        Raises ConfigurationError where it does not sleep.
        """
        self.runtime.wake()
        for param, state in self._states_on_device.items():
            self.optimizer.state[param].update(state)
        self._states_on_device.clear()
        for part in self._trained:
            part.param.data = part.values

    def state_dict(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves, or loads in place.

            checkpoint.save(sharded.state_dict(), checkpoint_id=folder)

            state = sharded.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
            sharded.load_state_dict(state)

        model.NAME: the parameter, in fp32 if trained, or a persistent buffer, as the first rank has
        it; optim.NAME.KEY: the optimizer's state of a parameter; param_groups: the optimizer's
        settings; grad_record: see KeepBudgets. Nothing is gathered, and hardly anything copied:
        save before the next step. It can be loaded into other sizes and numbers of ranks. An
        optimizer that has not stepped yet gets zeros for its state.
        """
        self.runtime.settle()
        asleep = self.runtime.asleep
        if asleep is None:
            self._create_optimizer_state()
        state: dict[str, Any] = {
            f"model.{part.name}": part.state_of(
                part.values if asleep is None else asleep.value_of(part.values)
            )
            for part in self._parts
            if part.held.numel
        }
        for part in self._trained:
            for key, value in self.optimizer.state[part.param].items():
                if part.held.numel:
                    is_whole = not isinstance(value, torch.Tensor) or value.dim() == 0
                    state[f"optim.{part.name}.{key}"] = value if is_whole else part.state_of(value)
        for name, buffer in _saved_buffers(self.model):
            values = buffer.detach().reshape(-1)
            is_first = dist.get_rank(self._group) == 0
            whole = ShardedState(buffer.shape, Range(0, buffer.numel()), values)
            whole.is_written = is_first
            state[f"model.{name}"] = whole
        state["grad_record"] = self.runtime.budgets.grad_record()
        state["param_groups"] = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`: a state_dict() of this object into which
        torch.distributed.checkpoint.load has read. Collective.
        """
        self.runtime.refuse_sleep()
        if missing := {"param_groups", "grad_record"} - state.keys():
            raise ConfigurationError(
                f"the state has no {sorted(missing)[0]}: it is to be a state_dict() of this object "
                "into which torch.distributed.checkpoint.load has read; a whole state dict of the "
                "model goes into sharded.model.load_state_dict()"
            )
        if not all(self._is_place_of(part, state) for part in self._parts if part.held.numel):
            raise ConfigurationError(
                "the state is not one of this object as it is now: call state_dict() again, after "
                "wake(), and load into that"
            )
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        for part in self._trained:
            own = self.optimizer.state[part.param]
            for key, value in own.items():
                if not isinstance(value, torch.Tensor) and part.held.numel:
                    own[key] = state[f"optim.{part.name}.{key}"]
        for name, buffer in _saved_buffers(self.model):
            buffer.copy_(state[f"model.{name}"].values.view(buffer.shape))
        self.runtime.budgets.expect_grads(state["grad_record"], self.runtime.units)
        self.runtime.sync_params()
        self.runtime.settle()

    def _is_place_of(self, part: _HeldFragment, state: Mapping[str, Any]) -> bool:
        """Whether loading into `state` has written the values of `part`."""
        found = state.get(f"model.{part.name}")
        return isinstance(found, ShardedState) and found.values.data_ptr() == part.values.data_ptr()

    @torch.no_grad()
    def _create_optimizer_state(self) -> None:
        """Torch's optimizers make their state in the first step: take one of no effect."""
        if self.optimizer.state or not self._trained:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        before: list[tuple[type, torch.Tensor | None]] = []
        for part in self._trained:
            param: Any = part.param
            kind, param.__class__ = type(param), nn.Parameter
            before.append((kind, param.grad))
            param.grad = torch.zeros_like(part.grad)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        self._makes_state = True
        self.optimizer.step()
        self._makes_state = False
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for part, (kind, grad) in zip(self._trained, before, strict=True):
            param = part.param
            param.grad, param.__class__ = grad, kind
        for state in self.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)()

    @torch.no_grad()
    def full_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of each parameter, one unit at a time in memory. Collective: every
        rank must take them all. A value is valid until the next one is taken."""
        self.runtime.refuse_sleep()
        self.runtime.settle()
        for unit in self.runtime.units:
            unit.unshard()
            try:
                yield from zip(unit.param_names, unit.params, strict=True)
            finally:
                unit.reshard()
        self._params.refuse_writes()

    @torch.no_grad()
    def load_full_params(self, values: Mapping[str, torch.Tensor] | None, source: int = 0) -> None:
        """Take over whole values of all parameters and persistent buffers, by the names of the
        model's state_dict, from one rank: tensor by tensor, so that no other rank holds more than
        one whole. Between two steps; the optimizer's state stays. Collective.

        values: on rank `source` of the group; any dtype and device. Not looked at elsewhere.
        Raises ConfigurationError, on all ranks, for a name that lacks or is not the model's, and
        for another shape.
        """
        self.runtime.refuse_sleep()
        self.runtime.settle()
        named: list[tuple[str, torch.Tensor]] = list(self.model.named_parameters())
        named += _saved_buffers(self.model)
        is_source = dist.get_rank(self._group) == source
        problem = [_problem_of_values(named, values) if is_source else None]
        place = dist.get_global_rank(self._group, source) if self._group else source
        dist.broadcast_object_list(problem, place, group=self._group)
        if problem[0] is not None:
            raise ConfigurationError(problem[0])
        for name, target in named:
            # fp32 holds what main parameters hold.
            dtype = torch.float32 if target.is_floating_point() else target.dtype
            whole = torch.empty(target.shape, dtype=dtype, device=self._device)
            if is_source and values is not None:
                whole.copy_(values[name])
            dist.broadcast(whole, place, group=self._group)
            if isinstance(target, nn.Parameter):
                self._params.load(target, whole)
            else:
                target.copy_(whole)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let the method `name` of `module`, which is the model or one of its modules, be called
        like its forward: as torch's register_fsdp_forward_method."""
        self.runtime.register_forward_method(module, name)

    # ---- what it costs

    def take_report(self) -> CommReport:
        """The communication of the steps since the last call; what Megatron's log line has."""
        return self._reports.take()

    @contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """What happens inside becomes a trace of this rank in `file` (JSON, for Perfetto), as with
        --asynchzp-trace: spans of computation and of each lane of communication."""
        with captured_trace(self.runtime.driver.timeline, Path(file), dist.get_rank(self._group)):
            yield

    # ---- the end

    def close(self) -> None:
        """Finish what is in flight and end the background threads."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
