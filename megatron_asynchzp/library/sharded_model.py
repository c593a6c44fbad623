# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine around a torch module: what a plain training loop needs, in one object."""

import atexit
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.engine.at_rest.host_states import HostStates
from megatron_asynchzp.engine.at_rest.sleep import Sleeper
from megatron_asynchzp.engine.at_rest.unit_stream import WholeUnit, drop_mark, mark, stream_units
from megatron_asynchzp.engine.comm.agreement import check_same_settings, optimizer_settings, text_of
from megatron_asynchzp.engine.comm.driver import CommReport
from megatron_asynchzp.engine.comm.timeline import captured_trace, profiler_range
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.engine.zero.params import TRAINED_DTYPES
from megatron_asynchzp.engine.zero.unit import Fragment, HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.arguments import (
    ALIKE,
    ShardCall,
    check_model,
    checked_call,
    checked_units,
)
from megatron_asynchzp.library.checkpoint import (
    ModelCheckpoint,
    loadable_tensors,
    problem_of_values,
)
from megatron_asynchzp.library.grads import (
    Origin,
    ShardGrad,
    ShardParam,
    change_class,
    grad_of,
    plain,
    set_data,
    set_grad,
)
from megatron_asynchzp.library.inference import outside_inference
from megatron_asynchzp.library.inputs import cast_inputs_of
from megatron_asynchzp.library.optimizer import (
    NewOptimizer,
    guarded_optimizer,
    make_states_plain,
    make_writable,
    may_send_early,
    refuse_early_states,
    watch_optimizers,
)
from megatron_asynchzp.library.params import ShardedParams
from megatron_asynchzp.library.runtime import runtime_of
from megatron_asynchzp.weight_delta import WeightDelta


@outside_inference()
def shard(
    model: nn.Module,
    units: Iterable[nn.Module] | None = None,
    sizes: ShardSizes | DeviceMesh | None = None,
    optimizer: NewOptimizer | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    schedule: ScheduleConfig = ScheduleConfig(),
    param_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    device: torch.device | str | None = None,
    offload: float = 0.0,
) -> "ShardedModel":
    """Shard `model` over the ranks of `group`. Collective over the world.

    Afterwards each call of `model` gathers the parameters of its units ahead of their use, and each
    backward reduces their gradients, while the device computes (AsyncHZP, arXiv 2510.20111).

    Args:
        model: The same on all ranks of the group. Its parameters are replaced by shards.
        units: Modules gathered as one. None: the layers in the outermost lists of modules. The rest
            of the model, and a parameter that several modules share, are units too.
        sizes: Ranks that share a copy of parameters, gradients and optimizer states. None: a node
            (LOCAL_WORLD_SIZE), a node, all. A mesh of all ranks: ZeRO-3 (1-D) or HSDP (2-D).
        optimizer: Called with name and this rank's part of each trained parameter: 1-D, fp32,
            possibly empty. For example `lambda params: torch.optim.AdamW(params, lr=1e-3)`.
        group: None for the default group.
        schedule: How communication runs in the background.
        param_dtype: torch.bfloat16 or float16, to gather and compute in; main parameters start from
            the model's fp32 values. None: the model's dtypes.
        cast_forward_inputs: Cast floating-point inputs of model and units to `param_dtype`, in
            containers and dataclasses too. False keeps all bits, of rotary tables say.
        device: Where a model on the meta device is filled. None: the accelerator, or the CPU.
        offload: Fraction of the optimizer states that is on the host between two updates.

    Raises:
        ConfigurationError: Invalid sizes or parameters, or calls that differ between ranks.
    """
    unit_modules = checked_units(model, units, param_dtype)
    call = checked_call(
        sizes, optimizer, group, schedule, param_dtype, cast_forward_inputs, device, offload
    )
    check_model(model, unit_modules, call)
    watch_optimizers()
    runtime, parts = runtime_of(model, unit_modules, call)
    if param_dtype is not None and cast_forward_inputs:
        cast_inputs_of(dict.fromkeys((model, *unit_modules)), param_dtype)
    return ShardedModel(model, runtime, parts, call)


def _owner(sharded: "ShardedModel") -> "Callable[[], ShardedModel]":
    """Return a function that returns `sharded` and does not keep it alive."""
    ref = weakref.ref(sharded)

    def get_owner() -> ShardedModel:
        owner = ref()
        if owner is None:
            raise ConfigurationError(
                "what shard() returned is gone; keep it as long as the model is trained, as in "
                "sharded = shard(...)"
            )
        return owner

    return get_owner


def _changing_params(
    method: Callable[[], Any], owner: "Callable[[], ShardedModel]"
) -> Callable[[], None]:
    def call() -> None:
        with owner().changing_params(), torch.no_grad():
            method()

    return call


def _close_at_exit(sharded: "weakref.ref[ShardedModel]") -> None:
    """Close a model that is open: a thread that waits for a collective would abort the process.

    After an error the other ranks may be gone, so nothing is closed.
    """
    model = sharded()
    if model is not None and not hasattr(sys, "last_exc"):
        with suppress(Exception):  # the collectives of a group that was destroyed
            model.close()


class ShardedModel:
    """A sharded model's step, gradient norm and checkpoint; `shard` makes it.

    for batches in data:
        sharded.zero_grad()
        for index, batch in enumerate(batches):
            sharded.set_is_last_micro_batch(index == len(batches) - 1)
            loss_of(model, batch).backward()
        sharded.clip_grad_norm_(1.0)
        sharded.step()
    """

    def __init__(
        self, model: nn.Module, runtime: HZPRuntime, parts: Sequence[Fragment], call: ShardCall
    ):
        self.model = model
        self.runtime = runtime
        self._group = group = call.group
        owner = _owner(self)
        runtime.agrees_on_reached = True
        self._params = ShardedParams(model, runtime)
        self._params.bind(lambda keeps: owner().zero_grad(keeps), lambda: owner().no_sync())
        trained = [part for part in parts if part.unit.is_trained]
        places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        self._trained = sorted(trained, key=lambda part: places[part.name])
        # Over this rank's parts of the fp32 main parameters; learning rates are changed there.
        self.optimizer = guarded_optimizer(call.new_optimizer, self._trained, self._device)
        self._follow_optimizer()
        params_of: dict[HZPUnit, list[nn.Parameter]] = {}  # in the order of a unit's layout
        for part in trained:
            params_of.setdefault(part.unit, []).append(part.param)
        if trained and may_send_early(self.optimizer, call.schedule):
            of_device = {unit: own for unit, own in params_of.items() if not unit.is_on_host}
            is_forced = call.schedule.early_update == "on"
            early_update = EarlyUpdate(self.optimizer, of_device, is_forced, is_awaited=True)
            runtime.early_sends.early_update = early_update
        settings = {"optimizer": type(self.optimizer).__qualname__}
        settings |= optimizer_settings(self.optimizer.param_groups)
        names = {part.param: part.name for part in trained}
        for index, own in enumerate(self.optimizer.param_groups):
            for param in own["params"]:
                settings[f"the optimizer's group of {names.get(param, 'nothing')}"] = str(index)
        check_same_settings(settings, group, self._device, ALIKE)
        self._clipped_to = "nothing"  # the last max_norm, as text
        runtime.settings_of_update = lambda: (
            {"max_norm of clip_grad_norm_": owner()._clipped_to}
            | optimizer_settings(owner().optimizer.param_groups)
        )
        is_first = dist.get_rank(group) == 0
        self._checkpoint = ModelCheckpoint(model, runtime, self.optimizer, parts, is_first)
        self._host_states: HostStates | None = None
        if any(unit.is_on_host for unit in runtime.units):
            self._host_states = HostStates([runtime], self.optimizer, params_of)
        self._await_grads()
        runtime.sent_check.enable_write_checks(lambda: owner()._params.refuse_writes())
        if dist.get_world_size(group) == dist.get_world_size():  # others do not come here
            runtime.driver.call_roll()
            self._take_largest(torch.zeros((), device=self._device))  # all have come here
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def _device(self) -> torch.device:
        return self.runtime.units[0].device

    @cached_property
    def _sleeper(self) -> Sleeper:
        owner = _owner(self)
        return Sleeper([self.runtime], lambda: owner().optimizer.state)

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ConfigurationError(
            "call the model that was sharded, as model(x), not what shard() returned"
        )

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        of_model = f"; the model has it: sharded.model.{name}" if hasattr(nn.Module, name) else ""
        raise AttributeError(f"a {kind} has no {name}{of_model}", name=name, obj=self)

    def _follow_optimizer(self) -> None:
        """Let the engine act before and after each update, and at each load of states."""
        owner, optimizer = _owner(self), self.optimizer
        attributes = cast("Any", optimizer)
        attributes.zero_grad = lambda set_to_none=True: owner().zero_grad(set_to_none)
        before = optimizer.register_step_pre_hook(lambda *call: owner()._before_update(*call))

        def register(hook: Any) -> RemovableHandle:
            """Run `hook` before the engine's own: it reads gradients as between steps."""
            handle = type(optimizer).register_step_pre_hook(optimizer, hook)
            attributes._optimizer_step_pre_hooks.move_to_end(before.id)
            return handle

        attributes.register_step_pre_hook = register
        optimizer.register_step_post_hook(lambda *call: owner()._after_update())
        optimizer.register_load_state_dict_pre_hook(lambda *_: owner().runtime.check_usable())
        optimizer.register_load_state_dict_post_hook(lambda _: owner()._take_over_states())
        for name in ("eval", "train"):  # as Schedule-Free has them, which then writes parameters
            if callable(method := getattr(optimizer, name, None)):
                setattr(optimizer, name, _changing_params(method, owner))
        for part in self._trained:
            param: Any = part.param
            param.await_grads = lambda: owner()._sync_grads()
            param.origin = Origin(part.name, lambda values: owner()._take_largest(values))
            param.is_away = part.unit.is_main_param_away

    def _take_over_states(self) -> None:
        make_writable(self.optimizer)
        if self._host_states is not None:
            self._host_states.take_over()

    # ---- one step

    @outside_inference()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a step: forget all gradients. The model's and optimizer's zero_grad do the same.

        Args:
            set_to_none: As in torch. False gives zeros to those that had one, for weight decay.
        """
        had_grads = set[HZPUnit]() if set_to_none else set(self.runtime.reductions.reached)
        self.runtime.zero_grads()
        self.runtime.reductions.reached |= had_grads
        self.set_is_last_micro_batch(True)
        self._await_grads()

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say before a forward whether it belongs to the step's last micro-batch.

        The last backward reduces the sum of all. A step of a single micro-batch needs no call.
        """
        self.runtime.is_last_micro_batch = is_last

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enclose all micro-batches but the last, in place of set_is_last_micro_batch()."""
        self.set_is_last_micro_batch(False)
        try:
            yield
        finally:
            self.set_is_last_micro_batch(True)

    @outside_inference()
    def _sync_grads(self) -> None:
        self.runtime.check_usable()
        if not self.runtime.are_grads_synced:
            self._params.refuse_changes()
            self.runtime.sync_grads()
        elif self._are_in_place:
            return
        for part in self._trained:
            # A gradient that the caller assigned stays.
            if not self._are_in_place or grad_of(part.param) is None:
                set_grad(part.param, self._guarded_grad(part))
        self._are_in_place = True

    def _guarded_grad(self, part: Fragment) -> torch.Tensor | None:
        """Return the gradient, or None if no backward has reached the unit, as in torch."""
        # A new object: the previous one's `data` may lie elsewhere by now.
        is_reached = part.unit in self.runtime.reached
        return (
            ShardGrad.of(part.grad, cast("ShardParam", part.param).origin) if is_reached else None
        )

    def _await_grads(self) -> None:
        self._are_in_place = False
        for part in self._trained:
            change_class(part.param, ShardParam)

    def _take_largest(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)

    @outside_inference()
    def _before_update(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigurationError(
                "step() of a sharded model's optimizer takes no closure; call backward before it"
            )
        self._sync_grads()
        self.runtime.await_readers()  # an evaluation may have started some since
        for part in self._trained:
            grad = grad_of(part.param)
            if grad is not None:
                refuse_early_states(self.optimizer, part.param, part.name)
            change_class(part.param, nn.Parameter)
            set_grad(part.param, None if grad is None else plain(grad))
        if self._host_states is not None:
            self._host_states.update()

    def _after_update(self) -> None:
        if torch.is_inference_mode_enabled():
            make_writable(self.optimizer)
        self._send_params()

    @outside_inference()
    def _send_params(self) -> None:
        for part in self._trained:  # an optimizer may assign to param.data
            if part.unit.is_main_param_away:
                continue
            if part.param.data_ptr() != part.values.data_ptr():
                part.values.copy_(part.param.data)
                part.param.data = part.values
        self.runtime.sync_params(skip_unchanged=True)
        self.runtime.hide_idle_units()
        self._await_grads()
        if self._host_states is not None:  # the caller may read the optimizer's state next
            self._host_states.settle()

    @outside_inference()
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients to a global norm of at most `max_norm`; return the norm before that.

        It is a 0-dim fp32 tensor, the same on all ranks. Collective.
        """
        self._sync_grads()
        self._clipped_to = text_of(max_norm)
        # Not part.grad: the caller may have assigned another one.
        grads = [
            (part, plain(grad))
            for part in self._trained
            if (grad := grad_of(part.param)) is not None and grad.numel()
        ]
        norms = [
            torch.linalg.vector_norm(grad) for part, grad in grads if part.unit.is_first_replica
        ]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, grad in grads:
            grad.mul_(scale)
        return norm

    @outside_inference()
    def step(self) -> None:
        """Update this rank's parts and begin to rebuild the parameters. Collective.

        Gradients are the mean over the ranks of the sum over each rank's micro-batches.
        """
        with profiler_range("optimizer"):
            self.optimizer.step()

    @contextmanager
    @outside_inference()
    def changing_params(self) -> Iterator[None]:
        """Enclose writes to the values of the optimizer's parameters. Collective.

        At the end the model's parameters are rebuilt, for example to evaluate an average.
        """
        self.runtime.check_usable()
        if any(unit.is_main_param_away for unit in self.runtime.units):
            raise ConfigurationError(
                "the values of the optimizer's parameters cannot be changed where they are on the "
                "host: leave out offload, or change them with model.load_state_dict()"
            )
        self.runtime.settle()  # gathers may still read them
        yield
        self.runtime.sync_params()
        self.runtime.hide_idle_units()

    # ---- asleep

    @outside_inference()
    def sleep(self, level: int = 1) -> None:
        """Free memory of the device between two steps, for a rollout say. Collective.

        States go to pinned memory of the host and come back by `wake` with the same bits. Until
        then only `state_dict` can be called.

        Args:
            level: 1 for gradients and optimizer states; 2 for parameter shards too.
        """
        make_states_plain(self.optimizer)
        self._sleeper.sleep(level)
        for part in self._trained:  # a read of memory that is gone would end the process
            if not part.unit.is_main_param_away:
                set_data(part.param, part.values[:0])

    @outside_inference()
    def wake(self) -> None:
        """Bring back to the device what `sleep` took. Collective."""
        self._sleeper.wake()
        for part in self._trained:
            if not part.unit.is_main_param_away:
                set_data(part.param, part.values)

    @outside_inference()
    def state_dict(
        self,
        only_trained: bool = False,
        extra: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the state that torch.distributed.checkpoint saves, or loads in place.

            checkpoint.save(sharded.state_dict(), checkpoint_id=folder)

            state = sharded.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
            sharded.load_state_dict(state)

            model.NAME      a parameter, in fp32 if trained, or a persistent buffer of rank 0
            optim.NAME.KEY  the parameter's optimizer state, or a mark that there is none yet
            param_groups    the optimizer's settings
            grad_record     see KeepBudgets

        It loads into any sizes. Save it before the next step, which changes most of its tensors.

        Args:
            only_trained: Leave out frozen parameters, which keep their values in a load.
            extra: The caller's 1-D tensors by a key and a trained parameter's name, with one value
                for each element of this rank's part. Saved and loaded as KEY.NAME.
        """
        if not self.runtime.is_asleep:
            self.runtime.settle()
        return self._checkpoint.state_dict(only_trained) | self._checkpoint.extra(extra)

    @outside_inference()
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state_dict() of this object that a checkpoint was loaded into. Collective."""
        self.runtime.check_usable()
        self._checkpoint.load_state_dict(state)
        self._take_over_states()

    @outside_inference()
    @torch.no_grad()
    def full_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole value of each parameter. Collective: exhaust it on every rank.

        One unit at a time is in memory; a value is valid until the next is taken.
        """
        for whole in stream_units(self.runtime):
            yield from whole.params
        self._params.refuse_writes()

    def stream_weights(
        self, *, receivers: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield name and whole value of each parameter for rollouts, between two steps. Collective.

        Two units are in memory. Each rank has to exhaust it; a value is valid until the next is
        taken. A tied weight comes once, by its first name; buffers do not come.

        Args:
            receivers: Ranks of the group that get values; the others yield nothing. None: all.
            dtype: torch.float32, bfloat16 or float16, rounded from the main parameters. None: the
                bits that the model computes with.
        """
        call = f"stream_weights(receivers={receivers}, dtype={dtype})"
        for whole in self._stream(call, receivers, dtype):
            yield from whole.params

    @outside_inference()
    def mark_weights(self, name: str) -> None:
        """Record from now on which weights change, for stream_changes(since=name).

        Costs a bit for each 16-bit element that this rank's optimizer owns.
        """
        mark(self.runtime, name)

    def forget_mark(self, name: str) -> None:
        """End a recording. Raises ConfigurationError for an unknown name."""
        drop_mark(self.runtime, name)

    @outside_inference()
    def stream_changes(
        self, since: str, *, receivers: Sequence[int] | None = None
    ) -> Generator[WeightDelta]:
        """Yield exact deltas, for apply_delta, since mark_weights(since).

        As stream_weights, but a delta may be kept and unchanged parameters do not come. fp32
        parameters come whole, and so do those that load_full_params wrote to.
        """
        call = f"stream_changes(since={since!r}, receivers={receivers})"
        for whole in self._stream(call, receivers, since=since):
            for index, (name, value) in enumerate(whole.params):
                delta = WeightDelta.of(name, value, whole.changed_in(index))
                if delta.values.numel():
                    yield delta

    @outside_inference()
    @torch.no_grad()
    def _stream(
        self,
        call: str,
        receivers: Sequence[int] | None,
        dtype: torch.dtype | None = None,
        since: str | None = None,
    ) -> Iterator[WholeUnit]:
        """Check a stream's arguments on all ranks, then yield its units. `call` is for messages."""
        self.runtime.check_between_steps(call.partition("(")[0] + "()")
        size = dist.get_world_size(self._group)
        calls: list[Any] = [None] * size
        dist.all_gather_object(calls, call, group=self._group)
        if different := next((name for name in calls if name != call), None):
            raise ConfigurationError(f"this rank calls {call}, another one {different}")
        if receivers is not None and not (receivers and set(receivers) <= set(range(size))):
            raise ConfigurationError(f"{call}: receivers are ranks of the group, 0 to {size - 1}")
        if dtype is not None and dtype not in TRAINED_DTYPES:
            raise ConfigurationError(f"{call}: dtype is torch.float32, bfloat16 or float16")
        ranks = dist.get_process_group_ranks(self._group)
        chosen = None if receivers is None else {ranks[rank] for rank in receivers}
        yield from stream_units(self.runtime, chosen, dtype, since)
        self._params.refuse_writes()

    @outside_inference()
    @torch.no_grad()
    def load_full_params(self, values: Mapping[str, torch.Tensor] | None, source: int = 0) -> None:
        """Take over whole values of all parameters and persistent buffers from rank `source`.

        Other ranks hold a single whole tensor at a time. Between two steps; the optimizer's state
        stays. Collective.

        Args:
            values: On that rank, by the names of the model's state_dict, of any dtype that the
                model's holds. A mapping may read each from a file. A tied weight has one name.
            source: Rank of the group.
        """
        self.runtime.check_usable()
        self.runtime.settle()
        is_source = dist.get_rank(self._group) == source
        targets = loadable_tensors(self.model)
        problem = [problem_of_values(self.model, targets, values) if is_source else None]
        place = dist.get_global_rank(self._group, source) if self._group else source
        dist.broadcast_object_list(problem, place, group=self._group)
        if problem[0] is not None:
            raise ConfigurationError(problem[0])
        for names, target in targets:
            is_trained = isinstance(target, nn.Parameter) and target.requires_grad
            # Main parameters are fp32.
            dtype = torch.float32 if is_trained else target.dtype
            whole = torch.empty(target.shape, dtype=dtype, device=self._device)
            if is_source and values is not None:
                whole.copy_(values[next(name for name in names if name in values)])
            # As bytes: not every backend sends every dtype.
            dist.broadcast(whole.view(-1).view(torch.uint8), place, group=self._group)
            if isinstance(target, nn.Parameter):
                self._params.load(target, whole)
            else:
                target.copy_(whole)

    @outside_inference()
    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let the method `name` of a module of the model be called like its forward."""
        self.runtime.register_forward_method(module, name)

    # ---- what it costs

    def take_report(self) -> CommReport:
        """Return the communication of the steps since the last call."""
        return self.runtime.driver.take_report()

    @contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write a trace of this rank's computation and communication to `file`, for Perfetto."""
        with captured_trace(self.runtime.driver.timeline, Path(file), dist.get_rank(self._group)):
            yield

    # ---- the end

    @outside_inference()
    def close(self) -> None:
        """Finish communication in flight and end the background threads."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
