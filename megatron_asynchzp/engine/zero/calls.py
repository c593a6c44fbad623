# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where a module call, or a region that runs by hand, and its backward begin and end."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron_asynchzp.engine.zero.tensors_within import tensors_within
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

_Inputs = dict[str, tuple[torch.dtype, torch.Size, bool]]


class CallEngine(Protocol):
    """The engine, as the hooks of module calls and regions see it."""

    # Whether calls are captured into a graph, and belong to no step.
    is_rehearsing: bool

    @property
    def is_in_region(self) -> bool: ...  # see HZPRuntime

    def before_forward(self, units: list[HZPUnit]) -> None: ...
    def after_forward(self, units: list[HZPUnit]) -> None: ...
    def before_backward(self, units: list[HZPUnit]) -> None: ...
    def after_backward(self, units: list[HZPUnit]) -> None: ...
    def region_forward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def region_backward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def complete(self, units: list[HZPUnit]) -> None: ...


class _Call:
    """A call of a module, and the begin and end of its backward.

    [Note: after backward] The module gets a view of each input tensor, the oldest node of its
    graph. Autograd runs the youngest ready node first (AccumulateGrad before all), so the
    parameters' gradients exist before the view's, whose hook ends the module's backward. If the
    module writes into its input, the view is not in the graph, so the input has the hook too. So
    have tensors in containers, which get no view: the module may write into the container.
    """

    def __init__(self, runtime: CallEngine, units: list[HZPUnit]):
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
        """Return the inputs with one view for each tensor that carries a gradient."""
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
        if type(value) is torch.Tensor:  # other classes have attributes of their own
            view.__dict__ = value.__dict__
        if value.is_leaf and any(unit.is_seated for unit in self._units):
            # The gradient is in memory of a CUDA graph, which a later replay overwrites.
            view.register_hook(torch.clone)
        view.register_hook(self.end_backward)
        return view

    def _watch(self, tensor: torch.Tensor) -> None:
        # The caller may keep a leaf for ever, and it would collect more and more hooks.
        if not tensor.is_leaf:
            _before_grad_of(tensor, self.end_backward)

    def watch_output(self, output: Any) -> None:
        tensors = (
            [output] if isinstance(output, torch.Tensor) else dict(tensors_within(output)).values()
        )
        for tensor in tensors:
            if tensor.requires_grad:
                _before_grad_of(tensor, self.begin_backward)


def _before_grad_of(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Let `hook` run when the gradient of `tensor` is complete, with each replay of a graph."""
    if (node := tensor.grad_fn) is None:
        tensor.register_hook(hook)  # pyright: ignore[reportUnknownMemberType]
    else:
        node.register_prehook(hook)


def _carries_grad(value: Any) -> bool:
    carries = isinstance(value, torch.Tensor) and value.requires_grad
    return carries and not isinstance(value, nn.Parameter)  # last, because it costs most


def attach_call_hooks(
    module: nn.Module, units: list[HZPUnit], runtime: CallEngine, around: Callable[[Any], Any]
) -> None:
    before, after = hooks_of_call(units, runtime)
    module.register_forward_pre_hook(around(before), prepend=True, with_kwargs=True)
    # always_call: an exception in the forward must not leave saved-tensor hooks behind.
    module.register_forward_hook(around(after), always_call=True)


def wrap_calls(module: nn.Module, units: list[HZPUnit], runtime: CallEngine) -> None:
    """Attach the hooks to a module whose class calls a captured graph, past torch's own hooks."""
    before, after = hooks_of_call(units, runtime)
    kind = type(module)
    captured: _Inputs = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.is_rehearsing:
            captured.update(_inputs_of(args, kwargs))
            return kind.__call__(self, *args, **kwargs)
        if self.training and captured:
            _refuse_other_inputs(units[0].name, _inputs_of(args, kwargs), captured)
        # The graph was captured in training, with dropout and counters.
        method = kind.__call__ if self.training else nn.Module.__call__
        return called(module, partial(method, self), before, after, args, kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), names)


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    tensors = [*tensors_within(args, "its inputs")]
    tensors += [pair for name, value in kwargs.items() for pair in tensors_within(value, name)]
    names = ["its first tensor", *(name for name, _ in tensors[1:])]
    return {
        name: (tensor.dtype, tensor.shape, tensor.requires_grad)
        for name, (_, tensor) in zip(names, tensors)
    }


def _refuse_other_inputs(unit: str, inputs: _Inputs, captured: _Inputs) -> None:
    for name, new in inputs.items():
        known = captured.get(name, None if len(captured) > 1 else new)
        if known is None or known[:2] != new[:2] or known[2] < new[2]:
            given, held = (f"{a[0]} {[*a[1]]}" + " that needs a gradient" * a[2] if a else "none"
                           for a in (new, known))  # fmt: skip
            raise ConfigurationError(
                f"{unit} is called with {name} of {given}, but its CUDA graph was captured with "
                f"{held}. Keep the micro-batch size, the sequence length and the arguments of "
                "layers, or drop --cuda-graph-impl."
            )


def called(
    module: nn.Module,
    method: Callable[..., Any],
    before: Callable[..., Any],
    after: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    output = None
    try:
        args, kwargs = before(module, args, kwargs)
        output = method(*args, **kwargs)
    finally:
        after(module, args, output)
    return output


def hooks_of_call(
    units: list[HZPUnit], runtime: CallEngine
) -> tuple[Callable[..., Any], Callable[..., None]]:
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
        return torch.is_grad_enabled() and not runtime.is_in_region

    return pre_forward, post_forward


@dataclass(frozen=True, eq=False)
class ManualRegion:
    """A part of a layer, such as its attention, whose backward is a run of autograd of its own.

        with region.forward(): ...     the parameters are needed | done
        with region.backward(): ...    the parameters are needed | done
        region.complete()              the gradients are complete, late ones too

    Modules within are called as usual. Other regions, of any micro-batch, may run between two of
    these moments, but not within one. See HZPRuntime.manual_region.
    """

    engine: CallEngine
    units: list[HZPUnit]
    completes: list[HZPUnit]
    recomputed: list[HZPUnit]

    def forward(self) -> AbstractContextManager[None]:
        return self.engine.region_forward(self.units)

    def backward(self) -> AbstractContextManager[None]:
        return self.engine.region_backward(list(dict.fromkeys([*self.units, *self.recomputed])))

    def complete(self) -> None:
        self.engine.complete(self.completes)
