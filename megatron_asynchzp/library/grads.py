# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the parameters of a sharded model's optimizer answer between two updates, about their
gradients above all.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from megatron_asynchzp.errors import ConfigurationError

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
    """As an assignment to the gradient of any parameter."""
    _GRAD.__set__(param, grad)


class PartParam(nn.Parameter):
    """The class, between two updates, of an optimizer's parameter: who reads its gradient waits for
    it. While the optimizer updates it is a plain parameter with a plain gradient.

    await_grads: returns when gradients are complete and in their places; agree: as in PartGrad.
    """

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


_SHAPES: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "nbytes")),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement")),
    *(torch.Tensor.__len__, torch.numel),
}
_VIEWS = (
    "__getitem__", "__iter__", "chunk", "expand", "flatten", "is_contiguous", "movedim", "narrow",
    "permute", "ravel", "reshape", "reshape_as", "select", "split", "squeeze", "stride", "swapaxes",
    "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
)  # fmt: skip
_SHAPES |= {getattr(torch.Tensor, name) for name in _VIEWS}
_SHAPES |= {getattr(torch, name) for name in _VIEWS if hasattr(torch, name)}
_ALIASES: set[Any] = {cast("Any", torch.Tensor).data.__get__, torch.Tensor.detach}


class WholeShaped(nn.Parameter):
    """The class of an optimizer's parameter while the function that makes the optimizer runs: it
    says the shape of the whole parameter, by which people build groups, and so do views of it,
    which have no values. All else is of the part.

    whole: of the whole shape, on the meta device.
    """

    whole: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with _ALONE():
            asked: Any = args[0] if args else None
            if func in _SHAPES and isinstance(asked, WholeShaped):
                return func(asked.whole, *args[1:], **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            if func in _ALIASES and isinstance(asked, WholeShaped):
                result = result.as_subclass(cls)
                result.whole = asked.whole
            return result
