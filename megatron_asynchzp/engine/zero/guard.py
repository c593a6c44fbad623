# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns classes of parameters without values, which notice each use of their elements."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

_NOTHING = nullcontext()

Use = Callable[..., Any]
"""A function of torch that may look at the elements of a parameter, or set them."""
Answer = Callable[[Use, tuple[Any, ...], Mapping[str, Any]], Any]
"""Gives the result of such a function; its own uses are not noticed."""

NO_GRAPHS = "gathers and reductions cannot be in it; leave the graph out"
"""Reason and remedy, if code captures a part of a sharded model."""

SHARDED_AS = "asynchzp_name"
"""The attribute of a sharded parameter that has its name in the model."""

# Functions that do not look at the elements of a parameter. All others unshard its unit.
# fmt: off
_PROPERTIES = ("dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda",
               "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version", "itemsize", "is_xpu",
               "is_mps", "is_nested", "retains_grad")
_METHODS = ("element_size", "storage_offset", "is_floating_point", "get_device", "is_complex",
            "requires_grad_", "register_hook", "register_post_accumulate_grad_hook")
_SHAPES = ("size", "numel", "nelement", "dim", "ndimension", "stride", "__len__")
# fmt: on
SHAPELESS: set[Use] = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    cast("Any", torch.Tensor).requires_grad.__set__,
    *(torch.is_floating_point, torch.is_complex),
}
"""Functions that read neither the elements of a parameter nor its shape."""
_HARMLESS: set[Use] = {
    *SHAPELESS,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "nbytes")),
    *(getattr(torch.Tensor, name) for name in _SHAPES),
    torch.numel,
} - {cast("Any", torch.Tensor).register_post_accumulate_grad_hook}
GRAD = cast("Any", torch.Tensor).grad.__get__
"""The gradient's getter."""
SET_GRAD = cast("Any", torch.Tensor).grad.__set__
DATA = (cast("Any", torch.Tensor).data.__get__, cast("Any", torch.Tensor).data.__set__)
"""Getter and setter of `data`; writes by it do not count in the tensor's version."""


def new_guarded_class(kind: type, answer: Answer) -> type:
    """Return a subclass of `kind` that calls `answer` for each use, also of the gradient."""

    def guard(
        _cls: type,
        func: Use,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if func in _HARMLESS:
                return func(*args, **(kwargs or {}))
            return answer(func, args, kwargs or {})

    def deepcopy(param: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
        values, needs_grad = param.data.clone(), param.requires_grad
        return memo.setdefault(id(param), torch.Tensor._make_subclass(kind, values, needs_grad))

    names = {"__torch_function__": classmethod(guard), "__deepcopy__": deepcopy}
    return type(kind)(kind.__name__, (kind,), names)


class ParamGuard:
    """Lets the parameters of a unit notice their use while nothing computes with them."""

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self._params = params
        self._kinds = [type(param) for param in params]
        self._guarded_kinds: list[type] | None = None

    def arm(self, guarded_kinds: Sequence[type]) -> None:
        """Let `hide` give each parameter its class of `guarded_kinds` (new_guarded_class)."""
        self._guarded_kinds = list(guarded_kinds)

    def hide(self) -> None:
        if self._guarded_kinds is not None:
            for param, kind in zip(self._params, self._guarded_kinds, strict=True):
                param.__class__ = kind

    def reveal(self) -> None:
        if self._guarded_kinds is not None:
            for param, kind in zip(self._params, self._kinds, strict=True):
                param.__class__ = kind

    def without_torch_function(self) -> AbstractContextManager[Any]:
        """Return a context for the engine's own uses, which guarded parameters do not notice."""
        if self._guarded_kinds is None:
            return _NOTHING
        return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]
