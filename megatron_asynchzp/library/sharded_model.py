# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine around a torch module: what a plain training loop needs, in one object."""

import atexit
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.at_rest.host_states import HostStates, move_to_host
from megatron_asynchzp.at_rest.sleep import Sleeper
from megatron_asynchzp.at_rest.unit_stream import WholeUnit, drop_mark, mark, stream_units
from megatron_asynchzp.comm.agreement import optimizer_settings, text_of
from megatron_asynchzp.comm.report import CommReport, CommReports
from megatron_asynchzp.comm.timeline import captured_trace, profiler_range
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.arguments import (
    checked_group,
    checked_optimizer,
    default_sizes,
    default_units,
    refuse_arguments,
    refuse_other_arguments,
    refuse_other_optimizers,
    refuse_param_dtype,
    sizes_of_mesh,
)
from megatron_asynchzp.library.checkpoint import ModelCheckpoint
from megatron_asynchzp.library.fragments import TrainedFragment, fragments_of
from megatron_asynchzp.library.grads import PartGrad, PartParam, grad_of, plain, set_data, set_grad
from megatron_asynchzp.library.meta_model import is_meta
from megatron_asynchzp.library.optimizer import NewOptimizer, guarded_optimizer, watch_optimizers
from megatron_asynchzp.library.params import ShardedParams
from megatron_asynchzp.library.runtime import checked_model, runtime_of
from megatron_asynchzp.library.whole_values import loadable_tensors, problem_of_values
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes
from megatron_asynchzp.weight_delta import WeightDelta
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.early_update import EarlyUpdate, is_elementwise
from megatron_asynchzp.zero.params import TRAINED_DTYPES
from megatron_asynchzp.zero.unit import HZPUnit


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
    offload: float = 0.0,
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
    offload: the part of the optimizer states, main parameters included, that is in pinned memory of
        the host between two updates, from 0 to 1: that of the first units, as few as have so much.
        They are updated on the device, unit after unit, with the bits of a run without it.

    Raises ConfigurationError for sizes that do not nest or do not divide the group, and for a
    parameter that cannot be sharded.
    """
    unit_modules = checked_model(model, default_units(model) if units is None else units, True)
    new_optimizer = checked_optimizer(optimizer)
    group = checked_group(group)
    if isinstance(sizes, DeviceMesh):
        sizes = sizes_of_mesh(sizes)
    sizes = default_sizes(group.size()) if sizes is None else sizes
    refuse_arguments(sizes, schedule, offload)
    refuse_param_dtype(param_dtype, model)
    watch_optimizers()
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    where = torch.device(device)
    there = where if is_meta(model) else next(model.parameters(), torch.empty(0)).device
    refuse_other_arguments(
        model,
        unit_modules,
        group,
        there,
        sizes=sizes,
        schedule=schedule,
        param_dtype=param_dtype,
        offload=offload,
    )
    runtime = runtime_of(model, unit_modules, sizes, group, schedule, where, param_dtype)
    return ShardedModel(model, runtime, new_optimizer, group, offload)


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


def _changing_params(
    method: Callable[[], Any], owner: "Callable[[], ShardedModel]"
) -> Callable[[], None]:
    def call() -> None:
        with owner().changing_params(), torch.no_grad():
            method()

    return call


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
        offload: float = 0.0,
    ):
        self.model, self.runtime = model, runtime
        self._device = runtime.units[0].device
        self._group = group
        runtime.agrees_on_reached = True
        owner = _owner(self)
        self._params = ShardedParams(model, runtime)
        self._params.bind(lambda keeps: owner().zero_grad(keeps), lambda: owner().no_sync())
        move_to_host([runtime], offload)
        self._parts = [part for unit in runtime.units for part in fragments_of(unit)]
        trained = [part for part in self._parts if isinstance(part, TrainedFragment)]
        places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        self._trained = sorted(trained, key=lambda part: places[part.name])
        self.optimizer = self._new_optimizer(new_optimizer)
        names = {part.param: part.name for part in self._trained}
        refuse_other_optimizers(self.optimizer, names, group, self._device)
        runtime.settings_of_update = lambda: (
            {"max_norm of clip_grad_norm_": owner()._clipped_to}
            | optimizer_settings(owner().optimizer.param_groups)
        )
        is_first = dist.get_rank(group) == 0
        self._checkpoint = ModelCheckpoint(model, runtime, self.optimizer, self._parts, is_first)
        self._host_states = self._new_host_states()
        self._sleeper = Sleeper([runtime], lambda: owner().optimizer.state)
        self.runtime.early_sends.early_update = self._new_early_update()
        self._are_in_place = False
        self._clipped_to = "nothing"  # the last max_norm, as text
        runtime.sent_check.enable_write_checks(lambda: owner()._params.refuse_writes())
        self._await_grads()
        if dist.get_world_size(group) == dist.get_world_size():  # others do not come here
            runtime.driver.call_roll()
            self._take_largest(torch.zeros((), device=self._device))  # all have come here
        self._reports = CommReports(runtime.driver)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _new_optimizer(self, new_optimizer: NewOptimizer) -> torch.optim.Optimizer:
        owner = _owner(self)
        optimizer = guarded_optimizer(new_optimizer, self._trained, self._device)
        attributes = cast("Any", optimizer)
        attributes.zero_grad = lambda set_to_none=True: owner().zero_grad(set_to_none)
        before = optimizer.register_step_pre_hook(lambda *call: owner()._before_update(*call))

        def register(hook: Any) -> RemovableHandle:
            """Let `hook` read gradients as outside of the step: ours comes last."""
            handle = type(optimizer).register_step_pre_hook(optimizer, hook)
            attributes._optimizer_step_pre_hooks.move_to_end(before.id)
            return handle

        attributes.register_step_pre_hook = register
        optimizer.register_step_post_hook(lambda *call: owner()._after_update())
        optimizer.register_load_state_dict_pre_hook(lambda *_: owner().runtime.refuse_use())
        optimizer.register_load_state_dict_post_hook(lambda _: owner()._take_over_states())
        for name in ("eval", "train"):  # as Schedule-Free has them, which then writes parameters
            if callable(method := getattr(optimizer, name, None)):
                setattr(optimizer, name, _changing_params(method, owner))
        for part in self._trained:
            param: Any = part.param
            param.await_grads = lambda: owner()._sync_grads()
            param.agree = lambda values: owner()._take_largest(values)
            param.is_away = part.unit.is_main_param_away
        return optimizer

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ConfigurationError(
            "call the model that was sharded, as model(x), not what shard() returned"
        )

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        of_model = f"; the model has it: sharded.model.{name}" if hasattr(nn.Module, name) else ""
        raise AttributeError(f"a {kind} has no {name}{of_model}", name=name, obj=self)

    def _params_of(self) -> dict[HZPUnit, list[nn.Parameter]]:
        """The optimizer's parameters of each trained unit, in the order of its layout."""
        params_of: dict[HZPUnit, list[nn.Parameter]] = {}
        for part in self._parts:
            if isinstance(part, TrainedFragment):
                params_of.setdefault(part.unit, []).append(part.param)
        return params_of

    def _new_host_states(self) -> HostStates | None:
        if not any(unit.is_on_host for unit in self.runtime.units):
            return None
        return HostStates([self.runtime], self.optimizer, self._params_of())

    def _take_over_states(self) -> None:
        if self._host_states is not None:
            self._host_states.take_over()

    def _new_early_update(self) -> EarlyUpdate | None:
        schedule = self.runtime.schedule
        if not schedule.may_send_early or not self._trained:
            return None
        if is_elementwise(self.optimizer):
            params_of = {
                unit: params for unit, params in self._params_of().items() if not unit.is_on_host
            }
            is_forced = schedule.early_update == "on"
            return EarlyUpdate(self.optimizer, params_of, is_forced, is_awaited=True)
        if schedule.early_update == "on":
            raise ConfigurationError(
                f"early_update='on': {type(self.optimizer).__name__} is not known to update each "
                "element from that element alone; take torch.optim.AdamW, Adam or SGD, or leave "
                "early_update out"
            )
        return None

    # ---- one step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a step: forget all gradients, and whatever an unfinished backward left. The same as
        `zero_grad` of the model or of the optimizer.

        set_to_none: as in torch. Where False, a unit that had gradients has zeros from now on, so
            that an optimizer goes on to decay it, whether or not a backward reaches it.
        """
        had_grads = set[HZPUnit]() if set_to_none else set(self.runtime.reductions.reached)
        self.runtime.zero_grads()
        self.runtime.reductions.reached |= had_grads
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
        self.runtime.refuse_use()
        if not self.runtime.are_grads_synced:
            self._params.refuse_changes()
            self.runtime.sync_grads()
        elif self._are_in_place:
            return
        for part in self._trained:
            # What somebody has put there stays.
            if not self._are_in_place or grad_of(part.param) is None:
                set_grad(part.param, self._guarded_grad(part))
        self._are_in_place = True

    def _guarded_grad(self, part: TrainedFragment) -> torch.Tensor | None:
        """None for a unit that no backward has reached, as in torch."""
        # Anew: the `data` of the last one may lie elsewhere by now.
        agree, is_reached = cast("PartParam", part.param).agree, part.unit in self.runtime.reached
        return PartGrad.of(part.grad, agree) if is_reached else None

    def _await_grads(self) -> None:
        """The gradients are not complete: who reads one waits for it."""
        self._are_in_place = False
        for part in self._trained:
            part.param.__class__ = PartParam

    def _take_largest(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)

    def _before_update(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigurationError(
                "step() of a sharded model's optimizer takes no closure; call backward before it"
            )
        self._sync_grads()
        self.runtime.await_readers()  # an evaluation may have left some after that
        for part in self._trained:
            grad = grad_of(part.param)
            part.param.__class__ = nn.Parameter
            set_grad(part.param, None if grad is None else plain(grad))
        if self._host_states is not None:
            self._host_states.update()

    def _after_update(self) -> None:
        for part in self._trained:  # an optimizer may assign to param.data
            if part.unit.is_main_param_away:
                continue
            if part.param.data_ptr() != part.values.data_ptr():
                part.values.copy_(part.param.data)
                part.param.data = part.values
        self.runtime.sync_params(skip_unchanged=True)
        self.runtime.rest()
        self._await_grads()
        if self._host_states is not None:  # what the optimizer's state has may be read next
            self._host_states.settle()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Returns the norm before that, a 0-dim fp32 tensor, the same on all ranks. Collective.
        """
        self._sync_grads()
        self._clipped_to = text_of(max_norm)
        # Not part.grad: somebody may have put another one in its place.
        grads = [
            (part, plain(grad))
            for part in self._trained
            if (grad := grad_of(part.param)) is not None and grad.numel()
        ]
        norms = [torch.linalg.vector_norm(grad) for part, grad in grads if part.is_counted]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, grad in grads:
            grad.mul_(scale)
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
        self.runtime.refuse_use()
        if any(unit.is_main_param_away for unit in self.runtime.units):
            raise ConfigurationError(
                "the values of the optimizer's parameters cannot be changed where they are on the "
                "host: leave out offload, or change them with model.load_state_dict()"
            )
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
        self._sleeper.sleep(level)
        for part in self._trained:  # reading what has no memory would end the process
            if not part.unit.is_main_param_away:
                set_data(part.param, part.values[:0])

    def wake(self) -> None:
        """Bring back what `sleep` took from the device. Collective.

        Raises ConfigurationError where it does not sleep.
        """
        self._sleeper.wake()
        for part in self._trained:
            if not part.unit.is_main_param_away:
                set_data(part.param, part.values)

    def state_dict(self, only_trained: bool = False) -> dict[str, Any]:
        """Return the state that torch.distributed.checkpoint saves, or loads in place.

            checkpoint.save(sharded.state_dict(), checkpoint_id=folder)

            state = sharded.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
            sharded.load_state_dict(state)

        model.NAME: the parameter, in fp32 if trained, or a persistent buffer, as the first rank has
        it; optim.NAME.KEY: the optimizer's state of a parameter; param_groups: the optimizer's
        settings; grad_record: see KeepBudgets. Nothing is gathered, and hardly anything copied:
        save before the next step. It can be loaded into other sizes and numbers of ranks. A state
        that the optimizer does not have yet is saved as not there, and is not there afterwards
        where such a state is loaded.

        only_trained: leave out parameters that are not trained. Their values stay as they are when
            such a state is loaded.
        """
        if not self.runtime.is_asleep:
            self.runtime.settle()
        return self._checkpoint.state_dict(only_trained)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`: a state_dict() of this object into which
        torch.distributed.checkpoint.load has read, with only_trained or without. Collective.
        """
        self.runtime.refuse_use()
        self._checkpoint.load_state_dict(state)
        self._take_over_states()

    @torch.no_grad()
    def full_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of each parameter, one unit at a time in memory. Collective: every
        rank must take them all. A value is valid until the next one is taken."""
        for whole in stream_units(self.runtime):
            yield from whole.params
        self._params.refuse_writes()

    def stream_weights(
        self, *, receivers: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Name and whole value of each parameter, in the order in which the last step used them,
        for rollouts or an export. Takes memory for two units: the next one is gathered meanwhile.

        A value is there until the next is taken. A tied weight comes once, by its first name;
        buffers do not come. Between two steps. Collective: every rank has to exhaust it.

        receivers: ranks of the group that get values, None for all. The others yield nothing, and
            get hardly anything (see the page on the library).
        dtype: torch.float32, bfloat16 or float16, rounded from the fp32 main parameters; None for
            the bits that the model computes with.

        Raises ConfigurationError, at the first value: within a step, asleep, while another stream
        is not finished, and for ranks or arguments that are none or differ between ranks.
        """
        call = f"stream_weights(receivers={receivers}, dtype={dtype})"
        for whole in self._stream(call, receivers, dtype):
            yield from whole.params

    def mark_weights(self, name: str) -> None:
        """From now on record which weights change, for stream_changes(since=name). A mark of the
        same name is replaced; several of other names may be kept.

        Costs a bit for each 16-bit parameter element that this rank's optimizer owns.

        Raises ConfigurationError within a step, asleep, and while weights are streamed.
        """
        mark(self.runtime, name)

    def forget_mark(self, name: str) -> None:
        """Record nothing for `name` any more. Raises ConfigurationError where it is no mark."""
        drop_mark(self.runtime, name)

    def stream_changes(
        self, since: str, *, receivers: Sequence[int] | None = None
    ) -> Generator[WeightDelta]:
        """Yield the deltas that turn the weights of the model at mark_weights(since) into those of
        now, bit for bit, by apply_delta; as stream_weights otherwise. Parameters without a change
        do not come. A delta may be kept.

        No copy of the model is kept: where the fp32 main parameters are rounded to the model's
        dtype the old and the new value are compared. fp32 parameters, which are not rounded, come
        whole, and so does what was written otherwise than by a step (load_full_params).
        """
        call = f"stream_changes(since={since!r}, receivers={receivers})"
        for whole in self._stream(call, receivers, since=since):
            for index, (name, value) in enumerate(whole.params):
                delta = WeightDelta.of(name, value, whole.changed_in(index))
                if delta.values.numel():
                    yield delta

    @torch.no_grad()
    def _stream(
        self,
        call: str,
        receivers: Sequence[int] | None,
        dtype: torch.dtype | None = None,
        since: str | None = None,
    ) -> Iterator[WholeUnit]:
        """call: for messages."""
        self.runtime.between_steps(call.partition("(")[0] + "()")
        size = dist.get_world_size(self._group)
        calls: list[Any] = [None] * size
        dist.all_gather_object(calls, call, group=self._group)
        if other := next((one for one in calls if one != call), None):
            raise ConfigurationError(f"this rank calls {call}, another one {other}")
        if receivers is not None and not (receivers and set(receivers) <= set(range(size))):
            raise ConfigurationError(f"{call}: receivers are ranks of the group, 0 to {size - 1}")
        if dtype is not None and dtype not in TRAINED_DTYPES:
            raise ConfigurationError(f"{call}: dtype is torch.float32, bfloat16 or float16")
        ranks = dist.get_process_group_ranks(self._group)
        chosen = None if receivers is None else {ranks[one] for one in receivers}
        yield from stream_units(self.runtime, chosen, dtype, since)
        self._params.refuse_writes()

    @torch.no_grad()
    def load_full_params(self, values: Mapping[str, torch.Tensor] | None, source: int = 0) -> None:
        """Take over whole values of all parameters and persistent buffers, by the names of the
        model's state_dict, from one rank: tensor by tensor, so that no other rank holds more than
        one whole. Between two steps; the optimizer's state stays. Collective.

        values: on rank `source` of the group; of any device, and of any dtype that the model's
            holds. A mapping that reads each from a file when it is asked takes no more memory. A
            tied weight has one of its names, or all with the same values. Not looked at elsewhere.
        Raises ConfigurationError, on all ranks, for a name that lacks or is not the model's, and
        for another shape or kind of dtype.
        """
        self.runtime.refuse_use()
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
            # fp32 holds what main parameters hold.
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

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let the method `name` of `module`, which is the model or one of its modules, be called
        like its forward: as torch's register_fsdp_forward_method."""
        self.runtime.register_forward_method(module, name)

    # ---- what it costs

    def take_report(self) -> CommReport:
        """The communication of the steps since the last call; what Megatron's log line has."""
        return self._reports.next_report()

    @contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write what happens inside as a trace of this rank to `file` (JSON, for Perfetto), as with
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
