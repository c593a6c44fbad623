# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the parameters of a sharded model's optimizer answer between two updates, about their
gradients above all.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.guard import DATA, GRAD, SET_GRAD, SHAPELESS

WHOLE_STATES = "torch.distributed.checkpoint.state_dict"
_GRAD = cast("Any", torch.Tensor).grad
_DATA = cast("Any", torch.Tensor).data
set_data: Callable[[nn.Parameter, torch.Tensor], None] = _DATA.__set__
"""As an assignment to the data of any parameter."""
_ALONE = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_SCALER = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore
_NORMS: set[Any] = {
    *(torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm),
    *(torch.nuclear_norm, torch.frobenius_norm, torch.linalg.matrix_norm),
    torch._foreach_norm,  # pyright: ignore
}
_COPIES: set[Any] = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__}


class PartGrad(torch.Tensor):
    """A rank's part of a gradient, in the hands of whoever reads it: 1-D, fp32.

    It and what is computed of it compute as other tensors do, except for norms: the norm of a part
    is taken for that of the whole, as torch's gradient clipping does. A GradScaler leaves out a
    step in which a gradient is not finite: it hears of those of all ranks.
    """

    agree: Callable[[torch.Tensor], None]

    @classmethod
    def of(cls, grad: torch.Tensor, agree: Callable[[torch.Tensor], None]) -> "PartGrad":
        """`grad` itself, in the same memory. agree: replaces its argument by the largest over all
        ranks."""
        with _ALONE():
            part = grad.as_subclass(cls)
        part.agree = agree
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS:
            raise ConfigurationError(
                "the norm of a gradient of sharded.optimizer's parameters is that of this rank's "
                "part; call sharded.clip_grad_norm_(max_norm), which returns the norm of all "
                "ranks' gradients, and scales none where max_norm is math.inf"
            )
        if func in _COPIES:
            return func(plain(args[0]), *args[1:], **(kwargs or {}))
        part = _first_part(args, kwargs or {})
        with _ALONE():
            result = func(*args, **(kwargs or {}))
        if part is None:
            return result
        if func is _SCALER:
            part.agree(args[1])
        if isinstance(result, (list, tuple)):
            parts: list[Any] = [_derived(one, args, part) for one in cast("list[Any]", result)]
            return parts if type(result) is list else result
        return _derived(result, args, part)


def _first_part(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PartGrad | None:
    for value in (*args, *kwargs.values()):
        for one in cast("list[Any]", value) if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, PartGrad) and hasattr(one, "agree"):
                return one
    return None


def _derived(result: Any, args: tuple[Any, ...], part: PartGrad) -> Any:
    is_new = type(result) is torch.Tensor and not any(result is arg for arg in args)
    return PartGrad.of(result, part.agree) if is_new and result.dim() else result


def plain(grad: torch.Tensor) -> torch.Tensor:
    """The same tensor, of torch's class."""
    if type(grad) is torch.Tensor:
        return grad
    with _ALONE():
        return grad.as_subclass(torch.Tensor)


def grad_of(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that `param` has now, which nobody waits for."""
    return _GRAD.__get__(param)


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Assign the gradient as to any parameter."""
    _GRAD.__set__(param, grad)


class PartParam(nn.Parameter):
    """The class, between two updates, of an optimizer's parameter: who reads its gradient waits for
    it. While the optimizer updates it is a plain parameter with a plain gradient.

    await_grads: returns when gradients are complete and in their places; agree: as in PartGrad.
    is_away: whether its values are on the host between two updates.
    """

    is_away = False
    await_grads: Callable[[], None]
    agree: Callable[[torch.Tensor], None]

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if sys._getframe(1).f_globals.get("__name__") == WHOLE_STATES:
            refuse_whole_states()
        self.await_grads()
        return grad_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            raise ConfigurationError(
                "the gradients of a sharded model are collected elsewhere, and add up; forget them "
                "with zero_grad()"
            )
        self.await_grads()
        set_grad(self, PartGrad.of(value, self.agree))

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """A write to where the values are: the engine sends them from there."""
        own = self.data
        if self.is_away:
            raise ConfigurationError(
                "param.data of sharded.optimizer's parameters is on the host between two updates, "
                "by offload; change values with model.load_state_dict()"
            )
        if (value.shape, value.dtype, value.device) != (own.shape, own.dtype, own.device):
            raise ConfigurationError(
                "param.data of sharded.optimizer's parameters keeps its shape, dtype and device: "
                f"{tuple(own.shape)}, {own.dtype}, {own.device}; sharded.sleep() moves it"
            )
        own.copy_(value)


def refuse_whole_states(*_: object) -> None:
    """Before an optimizer's state_dict(): torch's get_state_dict looks for whole parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != WHOLE_STATES:
        frame = frame.f_back
    if frame is not None:
        raise ConfigurationError(
            "the optimizer of a sharded model has this rank's parts, which torch's functions for "
            "state dicts do not know; sharded.state_dict() has model and optimizer for "
            "torch.distributed.checkpoint"
        )


_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_OF_PART: set[Any] = {
    *(*SHAPELESS, GRAD, SET_GRAD, DATA[1]),
    *(getattr(torch.Tensor, name) for name in ("data_ptr", "is_pinned", "is_shared", *_NEW)),
    *(torch.Tensor.__hash__, torch.Tensor.__repr__, torch.Tensor.__format__),
}
_MOVES = {getattr(torch.Tensor, name) for name in ("cpu", "cuda", "pin_memory", "to", "type")}


class WholeShaped(nn.Parameter):
    """The class of an optimizer's parameter while the function that makes the optimizer runs, and
    of all that is computed of it: it says the shape of the whole, by which people build groups.
    What has one value for each element has those of the part, from which optimizers make states;
    anything else has none, and values are refused to who asks for them.

    whole: of the whole shape, on the meta device. made: all that was computed, weakly.
    """

    whole: torch.Tensor
    made: "list[weakref.ref[WholeShaped]]"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _ALONE():
            if func in _OF_PART:
                return func(*args, **kwargs)
            asked = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
            is_move = func in _MOVES  # which no tensor on the meta device makes
            whole = asked[0].whole if is_move else cls._of_wholes(func, args, kwargs)
            if not any(isinstance(one, torch.Tensor) for one in tree_leaves(whole)):
                return whole
            try:
                part = func(*args, **kwargs)
            except Exception:  # it makes sense for the whole alone
                part = whole
            if is_move:
                if not isinstance(part, torch.Tensor):
                    return part  # the name of a type
                whole = whole.to(part.dtype)
            if any(part is one and whole is getattr(one, "whole", whole) for one in args):
                return part  # written in place, or moved to where it is
            if isinstance(whole, torch.Tensor):
                return cls._of(part, whole, asked)
            parts = part if len(part) == len(whole) else whole
            return type(whole)(map(partial(cls._of, asked=asked), parts, whole))

    @classmethod
    def _of_wholes(cls, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        def whole_of(one: Any) -> Any:
            if isinstance(one, cls):
                return one.whole
            return one.to("meta") if isinstance(one, torch.Tensor) else one

        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if "device" in kwargs:
            kwargs["device"] = "meta"
        try:
            return func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))
        except Exception as error:
            if isinstance(error, AttributeError) or "meta" not in str(error).lower():
                raise  # as that of the whole
            name = getattr(func, "__name__", str(func))
            raise ConfigurationError(
                f"{name}() of a parameter, in the function that makes the optimizer: each rank has "
                "a part of its values, so they cannot decide about groups or states; ask for "
                "names, shapes or attributes there, and for values before shard()"
            ) from error

    @classmethod
    def _of(cls, part: Any, whole: Any, asked: "Sequence[WholeShaped]") -> Any:
        if not isinstance(whole, torch.Tensor):
            return whole
        has_part = any(
            part.shape == one.shape and whole.numel() == one.whole.numel() for one in asked
        )
        result = (part if has_part else whole).as_subclass(cls)
        result.whole, result.made = whole, asked[0].made
        result.made.append(weakref.ref(result))
        return result


class _WithCopies(TorchFunctionMode):
    """Sees what asks no class of a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], WholeShaped):
            return args[0].detach().clone().to(**(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def whole_shapes(shapes: Mapping[nn.Parameter, Sequence[int]]) -> Iterator[None]:
    """Inside, these parameters are WholeShaped."""
    made: list[weakref.ref[WholeShaped]] = []
    for param, shape in shapes.items():
        one: Any = param
        one.__class__ = WholeShaped
        one.whole, one.made = torch.empty(tuple(shape), device="meta"), made
    try:
        with _WithCopies():
            yield
    finally:
        kept = [one for ref in made if (one := ref()) is not None]
        for one in (*shapes, *kept):
            one.__class__ = nn.Parameter if one in shapes else torch.Tensor
            del one.whole, one.made
