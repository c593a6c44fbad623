# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the preview of an update: what an optimizer is going to make of a unit's main parameters if
nothing changes the gradients any more, computed on copies.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from megatron_asynchzp.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.zero.unit import HZPUnit

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_OF_OTHERS = {
    ("transformer_engine", "FusedAdam"),
    ("transformer_engine", "FusedSGD"),
    ("apex", "FusedAdam"),
    ("apex", "FusedSGD"),
}
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_REMEMBERED = 3
_UNTIL_NEXT_TRIAL = 64


def is_elementwise(optimizer: object) -> bool:
    """Whether each element of a parameter is known to be updated from that element's gradient and
    states alone. A class of one's own says so with `is_elementwise = True`."""
    kind = type(optimizer)
    known = (kind.__module__.partition(".")[0], kind.__name__) in _OF_OTHERS
    return known or kind in _OF_TORCH or getattr(kind, "is_elementwise", False)


class EarlyUpdate:
    """Lets units be sent before the update that makes them, and says whether that came true.

    [Note: early update] The factor that clips gradients is known when the last gradient is, so an
    optimizer that clips begins after backward. Most steps clip nothing: their factor is exactly 1.
    So the update of a unit whose gradient is complete is computed with that factor, on copies of
    its states, and its parameters are sent while backward goes on. When the norm is known, the
    optimizer updates its states as ever. With a factor of 1 the same arithmetic on the same numbers
    gives the bits that were sent, and nothing is sent again. Otherwise all is sent, as without
    this. No state is written before the norm is known, so nothing is ever undone.

    optimizer: for which `is_elementwise` holds.
    params_of: of each unit whose gradient nothing changes between its reduction and the clipping:
        the optimizer's parameters that this rank owns, 1-D views of the unit's main_param.
    is_forced: all these units, in every step. Otherwise as many as backward has room for; and where
        three times in a row all had to be sent again, in every 64th step.
    inverse_scale: the factor that takes the loss scale out of the gradients, a 1-element fp32
        tensor, or None for none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params_of: Mapping[HZPUnit, Sequence[torch.nn.Parameter]],
        is_forced: bool = False,
        inverse_scale: Callable[[], torch.Tensor | None] = lambda: None,
    ):
        self._optimizer, self.is_forced = optimizer, is_forced
        # One that the optimizer does not have stays as it is.
        known = {param for group in optimizer.param_groups for param in group["params"]}
        self._params_of = {
            unit: [param for param in params if param.numel() and param in known]
            for unit, params in params_of.items()
        }
        self._inverse_scale = inverse_scale
        self._outcomes: deque[bool] = deque(maxlen=_REMEMBERED)
        self._num_pauses = 0
        self._settings: _Settings | None = None  # of this step's previews

    def may_send(self, unit: HZPUnit) -> bool:
        """Whether the parameters of `unit` may be sent before this step's update."""
        if unit not in self._params_of:
            return False
        is_vain = len(self._outcomes) == _REMEMBERED and not any(self._outcomes)
        return self.is_forced or not is_vain or self._num_pauses >= _UNTIL_NEXT_TRIAL

    def preview_of(self, unit: HZPUnit) -> Callable[[torch.Tensor], None]:
        """What updates its argument, this rank's main parameters of `unit` (1-D, fp32) or a copy of
        them, with the gradients as they are then and the settings of now, and writes nothing else.

        For the thread of a lane.
        """
        if self._settings is None:
            self._settings = _Settings.of(self._optimizer)
        return partial(self._preview, unit, self._settings)

    def decide(self, is_factor_1: bool, agree: Callable[[bool], bool] = bool) -> bool:
        """Whether the update that comes now makes what was sent, once per step.

        is_factor_1: whether nothing has changed the gradients since they were complete.
        agree: what all ranks say to it, where one may see what the others do not.
        """
        before, self._settings = self._settings, None
        if before is None:
            self._num_pauses += 1
            return False
        is_same = before.groups == _Settings.of(self._optimizer).groups
        self._num_pauses = 0
        self._outcomes.append(agree(is_factor_1 and is_same))
        return self._outcomes[-1]

    @torch.no_grad()
    def _preview(self, unit: HZPUnit, settings: "_Settings", values: torch.Tensor) -> None:
        main, grads = unit.main_param.storage, unit.main_grad.view(unit.optim_range)
        if (inverse := self._inverse_scale()) is not None:
            grads = grads.clone()
            found: torch.Tensor = torch.zeros(1, device=grads.device)
            torch._amp_foreach_non_finite_check_and_unscale_([grads], found, inverse)  # pyright: ignore
        groups: dict[int, dict[str, Any]] = {}
        copy_of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for param in self._params_of[unit]:
            start = (param.data_ptr() - main.data_ptr()) // FP32_NBYTES
            copy = copy_of[param] = torch.nn.Parameter(values[start : start + param.numel()])
            copy.grad = grads[start : start + param.numel()]
            index = settings.group_of[param]
            if index not in groups:
                groups[index] = {**_copied(settings.groups[index]), "params": []}
            groups[index]["params"].append(copy)
        if groups:
            _step_on(self._optimizer, list(groups.values()), copy_of)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


class _Settings(NamedTuple):
    """Of an optimizer. groups: learning rates and the like; group_of: where each parameter is."""

    groups: list[dict[str, Any]]
    group_of: dict[torch.nn.Parameter, int]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "_Settings":
        groups: list[dict[str, Any]] = []
        group_of: dict[torch.nn.Parameter, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            groups.append(_copied({key: group[key] for key in group if key != "params"}))
            group_of |= dict.fromkeys(group["params"], index)
        return cls(groups, group_of)


def _step_on(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    copy_of: Mapping[torch.nn.Parameter, torch.nn.Parameter],
) -> None:
    """A step of `optimizer` on copies of some of its parameters, without the hooks that were put on
    it. groups: of the copies."""
    kind = type(optimizer)
    other = object.__new__(kind)
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # a learning rate scheduler counts calls there
    # Beside the state Transformer Engine has the scales of moments that are not fp32.
    for name, table in vars(optimizer).items():
        if isinstance(table, dict) and any(param in table for param in copy_of):
            by_param = cast("dict[Any, dict[str, Any]]", table)
            found = {
                copy: _copied(by_param[one]) for one, copy in copy_of.items() if one in by_param
            }
            other.__dict__[name] = defaultdict[Any, dict[str, Any]](dict, found)
    if other.state is optimizer.state:  # before the first step
        other.state = defaultdict(dict)
    other.param_groups = groups
    other.__dict__ |= {hooks: OrderedDict[int, Any]() for hooks in _HOOKS}
    # torch wraps the step of a class once, for hooks of all optimizers: they are not for a copy.
    step: Any = kind.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(other)
