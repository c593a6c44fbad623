# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one call of a module: the engine hears before and after it, and when its backward begins
and is done.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.tensors_within import tensors_within
from megatron_asynchzp.zero.unit import HZPUnit

_Inputs = dict[str, tuple[torch.dtype, torch.Size, bool]]


class Engine(Protocol):
    """The engine, as it hears of the calls of modules that need `units`.

    is_rehearsing: whether calls are captured into a graph, and are none of a step.
    is_in_part: whether a part runs, which says itself when its backward begins and is done.
    """

    is_rehearsing: bool

    @property
    def is_in_part(self) -> bool: ...

    def before_forward(self, units: list[HZPUnit]) -> None: ...
    def after_forward(self, units: list[HZPUnit]) -> None: ...
    def before_backward(self, units: list[HZPUnit]) -> None: ...
    def after_backward(self, units: list[HZPUnit]) -> None: ...


class _Call:
    """One call of a module: when its backward begins and when it is done.

    [Note: after backward] Each tensor that the module is called with is handed on as a view. It is
    the oldest node of the module's graph and autograd runs the youngest ready node first
    (AccumulateGrad before all), so when its gradient is complete those of the module's parameters
    exist. A module that writes into its input in place leaves that node out of the graph; then the
    gradient of the tensor before the view says so, which is older still. Containers are left as
    they are, for the module may write into them: their tensors say so themselves.
    """

    def __init__(self, runtime: Engine, units: list[HZPUnit]):
        self._runtime, self._units, self._is_done = runtime, units, False

    def begin_backward(self, _grad: Any) -> None:
        self._is_done = False
        self._runtime.before_backward(self._units)

    def end_backward(self, _grad: Any) -> None:
        if not self._is_done:
            self._is_done = True
            self._runtime.after_backward(self._units)

    def watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same inputs, of which those that carry a gradient are views: one of each, because a
        module may ask whether two of them are one tensor, with all that was noted on it.

        A parameter among them (a tied weight) is left alone: what comes out would be a view of it
        that the caller's frame keeps for longer than the unit is gathered.
        """
        values = [*args, *kwargs.values()]
        if known := {id(value): value for value in values if _carries_grad(value)}:
            views = {number: self._viewed(value) for number, value in known.items()}
            return (
                tuple(views.get(id(value), value) for value in args),
                {name: views.get(id(value), value) for name, value in kwargs.items()},
            )
        for _, tensor in tensors_within(values):
            if _carries_grad(tensor):
                self._watch(tensor)
        return args, kwargs

    def _viewed(self, value: torch.Tensor) -> torch.Tensor:
        self._watch(value)
        if value.layout is not torch.strided or value.is_nested:
            return value
        view: Any = value.view_as(value)
        if type(value) is torch.Tensor:  # another class keeps its own there
            view.__dict__ = value.__dict__
        if value.is_leaf and any(unit.is_seated for unit in self._units):
            # A graph gives memory that it, or another one, writes again.
            view.register_hook(torch.clone)
        view.register_hook(self.end_backward)
        return view

    def _watch(self, tensor: torch.Tensor) -> None:
        # Hooks of a leaf, which the caller may keep for ever, would become more and more.
        if not tensor.is_leaf:
            _before_grad_of(tensor, self.end_backward)

    def watch_output(self, output: Any) -> None:
        """Watch the tensors in the output of the module, which may have any form."""
        found = (
            [output] if isinstance(output, torch.Tensor) else dict(tensors_within(output)).values()
        )
        for tensor in found:
            if tensor.requires_grad:
                _before_grad_of(tensor, self.begin_backward)


def _before_grad_of(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Let `hook` run when the gradient of `tensor` is complete. A graph gives the same tensor with
    each replay, and torch would leave a hook of the tensor with the first one's backward."""
    if (node := tensor.grad_fn) is None:
        tensor.register_hook(hook)  # pyright: ignore[reportUnknownMemberType]
    else:
        node.register_prehook(hook)


def _carries_grad(value: Any) -> bool:
    carries = isinstance(value, torch.Tensor) and value.requires_grad
    return carries and not isinstance(value, nn.Parameter)  # asked last, for it costs more


def attach_call_hooks(
    module: nn.Module, units: list[HZPUnit], runtime: Engine, around: Callable[[Any], Any]
) -> list[RemovableHandle]:
    """Hook `module`, whose call needs the parameters of `units`. Returns the handles."""
    before, after = hooks_of_call(units, runtime)
    return [
        module.register_forward_pre_hook(around(before), prepend=True, with_kwargs=True),
        # always_call: an exception in the forward must not leave saved-tensor hooks behind.
        module.register_forward_hook(around(after), always_call=True),
    ]


def wrap_calls(module: nn.Module, units: list[HZPUnit], runtime: Engine) -> SimpleNamespace:
    """As attach_call_hooks, for a module whose class calls something else than its forward, which
    no hook of torch hears of: a captured graph. Returns a handle, as torch's for a hook."""
    before, after = hooks_of_call(units, runtime)
    kind = type(module)
    captured: _Inputs = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.is_rehearsing:
            captured.update(_inputs_of(args, kwargs))
            return kind.__call__(self, *args, **kwargs)
        if self.training and captured:
            _refuse_other_inputs(units[0].name, _inputs_of(args, kwargs), captured)
        # A graph has what training does: dropout, and what is counted.
        method = kind.__call__ if self.training else nn.Module.__call__
        return called(module, partial(method, self), before, after, args, kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), names)
    return SimpleNamespace(remove=partial(setattr, module, "__class__", kind))


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    """Return what a graph is captured for of each tensor, by name, that its layer is called with.
    The first one may come with a name or without."""
    found = [*tensors_within(args, "its inputs")]
    found += [pair for name, value in kwargs.items() for pair in tensors_within(value, name)]
    names = ["its first tensor", *(name for name, _ in found[1:])]
    return {name: (one.dtype, one.shape, one.requires_grad) for name, (_, one) in zip(names, found)}


def _refuse_other_inputs(unit: str, inputs: _Inputs, captured: _Inputs) -> None:
    """Raise ConfigurationError where `inputs` are not those of the graph: a replay would expand and
    cast them, stop their gradients, or leave them out. Where it has one, its part of the layer
    takes no other."""
    for name, one in inputs.items():
        known = captured.get(name, None if len(captured) > 1 else one)
        if known is None or known[:2] != one[:2] or known[2] < one[2]:
            given, held = (f"{a[0]} {[*a[1]]}" + " that needs a gradient" * a[2] if a else "none"
                           for a in (one, known))  # fmt: skip
            raise ConfigurationError(
                f"{unit} is called with {name} of {given}, and its CUDA graph was captured with "
                f"{held}: keep the micro-batch size, the sequence length and what layers are "
                "called with, or drop --cuda-graph-impl"
            )


def called(
    module: nn.Module,
    method: Callable[..., Any],
    before: Callable[..., Any],
    after: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `method` of `module` with the two of hooks_of_call around it, and return its output."""
    output = None
    try:
        args, kwargs = before(module, args, kwargs)
        output = method(*args, **kwargs)
    finally:
        after(module, args, output)
    return output


def hooks_of_call(
    units: list[HZPUnit], runtime: Engine
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Make the hooks before and after a call that needs the parameters of `units`."""
    calls: list[_Call] = []

    def pre_forward(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        calls.append(_Call(runtime, units))
        runtime.before_forward(units)
        return calls[-1].watch_inputs(args, kwargs) if is_watched() else (args, kwargs)

    def post_forward(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        call = calls.pop()
        runtime.after_forward(units)
        if is_watched():
            call.watch_output(output)

    def is_watched() -> bool:
        return torch.is_grad_enabled() and not runtime.is_in_part

    return pre_forward, post_forward
