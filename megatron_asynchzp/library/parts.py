# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors computed from a rank's part of a parameter: copies, averages, gradients."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Self, cast

import torch
from torch import nn

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
