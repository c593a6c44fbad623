# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's parameters between two updates, their gradients, and tensors computed of both."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_asynchzp.engine.zero.guard import DATA, GRAD, SET_GRAD, SHAPELESS
from megatron_asynchzp.errors import ConfigurationError

_PLAIN = (torch.Tensor, nn.Parameter)
without_torch_function = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]


class Origin(NamedTuple):
    """The parameter that a tensor has a part of, and a reduction over all ranks."""

    name: str
    agree: Callable[[torch.Tensor], None]  # replaces its argument by the maximum over the ranks


class ShardTensor(torch.Tensor):
    """A tensor that torch computed from a rank's part of a parameter, or wrote such values to.

    It refuses torch.distributed.checkpoint, which would save the first rank's for all ranks.
    """

    origin: Origin

    @classmethod
    def of(cls, tensor: torch.Tensor, origin: Origin) -> Self:
        """Return a ShardTensor in the same memory."""
        with without_torch_function():
            part = tensor.as_subclass(cls)
        part.origin = origin
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__reduce_ex__:
            return func(plain(args[0]), *args[1:], **(kwargs or {}))
        return cls._compute(func, args, kwargs or {})

    @classmethod
    def _compute(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        origin = first_origin(args, kwargs)
        with without_torch_function():
            if func is torch.Tensor.__deepcopy__:
                return cls.of(func(plain(args[0]), *args[1:]), cast("Origin", origin))
            versions = [
                (tensor, tensor._version)
                for tensor in _tensors_among(args, kwargs)
                if type(tensor) in _PLAIN and not tensor.is_inference()
            ]
            result = func(*args, **kwargs)
            if origin is None:
                return result
            for tensor, version in versions:
                if tensor._version != version:
                    _note_origin(tensor, origin)
        if isinstance(result, (list, tuple)):
            items = cast("list[Any]", result)
            parts: list[Any] = [cls._derived(item, args, origin) for item in items]
            return parts if type(result) is list else result
        return cls._derived(result, args, origin)

    @classmethod
    def _derived(cls, result: Any, args: tuple[Any, ...], origin: Origin) -> Any:
        is_new = type(result) is torch.Tensor and not any(result is arg for arg in args)
        return cls.of(result, origin) if is_new and result.dim() else result

    def __create_write_items__(self, key: str, _: object) -> NoReturn:
        raise ConfigurationError(
            f"{key} is computed from this rank's part of {self.origin.name}, and a checkpoint "
            "would have the first rank's alone; save and load it as sharded.state_dict(extra="
            '{"ema": {name: tensor}}), by the names of the parameters'
        )

    def __create_chunk_list__(self) -> NoReturn:
        self.__create_write_items__("a tensor", None)


def _tensors_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        for item in cast("list[Any]", value) if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def first_origin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origin | None:
    """Return the origin of the first tensor among the arguments of a function that has one."""
    origins = (getattr(tensor, "origin", None) for tensor in _tensors_among(args, kwargs))
    return next((origin for origin in origins if origin), None)


def change_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Change the class of a tensor that a caller keeps."""
    cast("Any", tensor).__class__ = kind


def _note_origin(tensor: torch.Tensor, origin: Origin) -> None:
    """Make `tensor`, and the tensor that it is a view of, ShardTensors."""
    for written in (tensor, tensor._base):
        if written is not None and type(written) in _PLAIN and written.dim():
            marked: Any = written
            marked.origin, marked._is_param = origin, isinstance(written, nn.Parameter)
            change_class(written, ShardTensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor with torch's own class."""
    if type(tensor) is torch.Tensor:
        return tensor
    with without_torch_function():
        return tensor.as_subclass(torch.Tensor)


WHOLE_STATES = "torch.distributed.checkpoint.state_dict"
_GRAD = cast("Any", torch.Tensor).grad
_DATA = cast("Any", torch.Tensor).data
set_data: Callable[[nn.Parameter, torch.Tensor], None] = _DATA.__set__
"""Assign `param.data` as for a plain parameter."""
_SCALER = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore
_NORMS: set[Any] = {
    *(torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm),
    *(torch.nuclear_norm, torch.frobenius_norm, torch.linalg.matrix_norm),
    torch._foreach_norm,  # pyright: ignore
}


class ShardGrad(ShardTensor):
    """A rank's part of a gradient, 1-D fp32.

    Its norm is refused, because torch's clipping would use it as the global norm. A GradScaler
    skips a step in which any rank's gradient is not finite.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS:
            raise ConfigurationError(
                "the norm of a gradient of sharded.optimizer's parameters is that of this rank's "
                "part; call sharded.clip_grad_norm_(max_norm), which returns the norm of all "
                "ranks' gradients; with math.inf it scales nothing"
            )
        result = super().__torch_function__(func, types, args, kwargs)
        if func is _SCALER:
            cast("Origin", first_origin(args, {})).agree(args[1])
        return result


def grad_of(param: nn.Parameter) -> torch.Tensor | None:
    """Return the present gradient without waiting until it is complete."""
    with without_torch_function():
        return _GRAD.__get__(param)


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Assign the gradient as to any parameter."""
    with without_torch_function():
        _GRAD.__set__(param, grad)


class ShardParam(nn.Parameter):
    """The class of an optimizer's parameter between two updates.

    A read of its gradient waits until gradients are complete. While the optimizer updates, it is a
    plain parameter with a plain gradient.
    """

    is_away = False  # whether its values are on the host between two updates
    await_grads: Callable[[], None]  # returns when gradients are complete and in place
    origin: Origin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return ShardTensor.__torch_function__(func, types, args, kwargs)

    __create_write_items__ = ShardTensor.__create_write_items__
    __create_chunk_list__ = ShardTensor.__create_chunk_list__

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # [Note: caller] torch's get_state_dict would take a step here, to make states.
        if sys._getframe(1).f_globals.get("__name__") == WHOLE_STATES:
            refuse_whole_states()
        self.await_grads()
        return grad_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            raise ConfigurationError(
                "param.grad = None has no effect on a sharded model, whose engine adds gradients "
                "up. Call zero_grad()"
            )
        self.await_grads()
        set_grad(self, ShardGrad.of(plain(value), self.origin))

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write in place: the engine sends values from this memory."""
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
    """Refuse torch's get_state_dict, which needs whole parameters; a hook of state_dict()."""
    # [Note: caller] Only the stack tells it from a training loop: it reads gradients and states
    # alike, and silently drops states of parameters that are not the model's.
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != WHOLE_STATES:
        frame = frame.f_back
    if frame is not None:
        raise ConfigurationError(
            "the optimizer of a sharded model has this rank's parts, which torch's functions for "
            "state dicts do not know. Call sharded.state_dict(), which has model and optimizer for "
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
    """The class of parameters, and of tensors computed from them, while an optimizer is made.

    They have the shapes of whole parameters, by which loops build groups. Tensors with one value
    per element have the part's values, for an optimizer's states; reading values is refused.
    """

    whole: torch.Tensor  # on the meta device
    made: "list[weakref.ref[WholeShaped]]"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func in _OF_PART:
                return func(*args, **kwargs)
            asked = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
            is_move = func in _MOVES  # not possible on the meta device
            whole = asked[0].whole if is_move else cls._of_wholes(func, args, kwargs)
            if not any(isinstance(one, torch.Tensor) for one in tree_leaves(whole)):
                return whole
            try:
                part = func(*args, **kwargs)
            except Exception:  # possible only with the whole shape
                part = whole
            if is_move:
                if not isinstance(part, torch.Tensor):
                    return part  # the name of a type
                whole = whole.to(part.dtype)
            if any(part is one and whole is getattr(one, "whole", whole) for one in args):
                return part  # written in place, or already on the asked device
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
                raise  # the whole parameter's own error
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
    """Handles torch.tensor, which calls no __torch_function__ of a class."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], WholeShaped):
            return args[0].detach().clone().to(**(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def whole_shapes(shapes: Mapping[nn.Parameter, Sequence[int]]) -> Iterator[None]:
    """Make these parameters WholeShaped within the context."""
    made: list[weakref.ref[WholeShaped]] = []
    for param, shape in shapes.items():
        one: Any = param
        change_class(param, WholeShaped)
        one.whole, one.made = torch.empty(tuple(shape), device="meta"), made
    try:
        with _WithCopies():
            yield
    finally:
        kept = [one for ref in made if (one := ref()) is not None]
        for one in (*shapes, *kept):
            change_class(one, nn.Parameter if one in shapes else torch.Tensor)
            del one.whole, one.made
