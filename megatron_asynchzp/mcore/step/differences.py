# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces functions that some versions of megatron-core lack and no patch replaces."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as _optimizer
from megatron.core.optimizer.clip_grads import count_zeros_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_asynchzp.mcore.patches.patch import mismatch

GRAD_NORM_GROUPS: tuple[str, ...] = getattr(_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ())
"""Groups of parameters with a gradient norm of their own; 0.18 has none."""


def copy_optimizer_param_metadata(to: torch.Tensor, source: torch.Tensor) -> None:
    stock = getattr(_optimizer, "copy_optimizer_param_metadata", None)
    if stock is not None:
        stock(to, source)
        return
    for name in ("allreduce", "shared"):  # 0.18
        if hasattr(source, name):
            setattr(to, name, getattr(source, name))


def is_counted_once(param: torch.Tensor, tp_group: Any, expert_tp_group: Any) -> bool:
    """Return whether this rank's copy of `param` counts in sums over TP ranks and stages."""
    # megatron-core 0.18 has no expert_tp_group: tp_group decides for experts too.
    is_first = _without_unknown(
        param_is_not_tensor_parallel_duplicate,
        param,
        tp_group=tp_group,
        expert_tp_group=expert_tp_group,
    )
    return is_first and param_is_not_shared(param)


def count_zeros(
    params: Sequence[torch.nn.Parameter],
    sum_over: dist.ProcessGroup,
    tp_group: Any,
    expert_tp_group: Any,
    use_decoupled_grad: bool = False,
) -> float:
    return _without_unknown(
        count_zeros_fp32,
        [*params],
        grad_stats_parallel_group=sum_over,
        tp_group=tp_group,
        expert_tp_group=expert_tp_group,
        use_decoupled_grad=use_decoupled_grad,
    )


def _without_unknown(function: Callable[..., Any], *args: Any, **groups: Any) -> Any:
    known = signature(function).parameters
    return function(*args, **{name: group for name, group in groups.items() if name in known})


def called_by_megatron[Kind: type](*one_of: str) -> Callable[[Kind], Kind]:
    """Check that a class overrides methods of its bases, as Megatron calls no other name.

    They are the methods marked with `typing.override`, and one of the methods named `one_of`.
    Raises ConfigurationError.
    """

    def checked(kind: Kind) -> Kind:
        marked = [
            name for name, method in vars(kind).items() if getattr(method, "__override__", False)
        ]
        for names in [*((name,) for name in marked), *([one_of] if one_of else [])]:
            if not any(hasattr(base, name) for base in kind.__mro__[1:] for name in names):
                above, missing = kind.__mro__[1].__qualname__, " or ".join(names)
                raise mismatch(f"{above}.{missing}", "does not exist")
        return kind

    return checked
