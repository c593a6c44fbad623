# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the preview of an update: what an optimizer is going to make of a unit's main parameters if
nothing changes the gradients any more, computed on copies.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from megatron_asynchzp.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.zero.taken_grads import give_grad
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
    """Lets units be sent before the update that makes them.

    [Note: early update] The factor that clips gradients is known when the last gradient is, so an
    optimizer that clips begins after backward. Most steps clip nothing: their factor is exactly 1.
    So the update of a unit whose gradient is complete is computed with that factor, on copies of
    its states, and its parameters are sent while backward goes on. When the norm is known, the
    optimizer updates its states as ever. With a factor of 1 the same arithmetic on the same numbers
    gives the bits that were sent, and nothing is sent again. Whether it does is compared
    ([Note: compared with what was sent]); what differs is sent, as without this. No state is
    written before the norm is known, so nothing is ever undone.

    optimizer: for which `is_elementwise` holds.
    params_of: of each unit whose gradient nothing changes between its reduction and the clipping:
        the optimizer's parameters that this rank owns, 1-D views of the unit's main_param.
    is_forced: all these units, in every step. Otherwise as many as backward has room for; and where
        three times in a row all had to be sent again, in every 64th step.
    is_awaited: whether the host waits for the comparison also where it runs ahead of a device, and
        sends again what differs. Otherwise a difference ends the run.
    inverse_scale: the factor that takes the loss scale out of the gradients, a 1-element fp32
        tensor, or None for none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params_of: Mapping[HZPUnit, Sequence[torch.nn.Parameter]],
        is_forced: bool = False,
        is_awaited: bool = False,
        inverse_scale: Callable[[], torch.Tensor | None] = lambda: None,
    ):
        self._optimizer = optimizer
        self.is_forced, self.is_awaited = is_forced, is_awaited
        self._params_of = {
            unit: [param for param in params if param.numel()] for unit, params in params_of.items()
        }
        self._inverse_scale = inverse_scale
        self._outcomes: dict[int, bool] = {}  # of the last steps in which something was sent
        self._group_of: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._step = 0  # to which that belongs

    def may_send(self, unit: HZPUnit, step: int) -> bool:
        """Whether the parameters of `unit` may be sent before the update of step number `step`."""
        # Somebody may have given it another class since.
        if unit not in self._params_of or not is_elementwise(self._optimizer):
            return False
        recent = [number for number in self._outcomes if number != step]
        is_vain = len(recent) == _REMEMBERED and not any(map(self._outcomes.get, recent))
        return self.is_forced or not is_vain or step - recent[-1] >= _UNTIL_NEXT_TRIAL

    def note_outcome(self, step: int, did_stand: bool) -> None:
        """Whether anything that was sent in step number `step` was not sent again; once for each
        model chunk that sent something, and the same on all ranks."""
        self._outcomes[step] = self._outcomes.pop(step, False) or did_stand
        while len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def preview_of(self, unit: HZPUnit, step: int) -> Callable[[torch.Tensor], None]:
        """Return a function that updates its argument, this rank's main parameters of `unit` (1-D,
        fp32) or a copy of them, with the gradients and settings as they are then, and nothing else.

        It is for the thread of a lane. What that reads is collected here, where nobody else
        changes it. step: the number of the one that runs.
        """
        optimizer, params = self._optimizer, self._params_of[unit]
        if step != self._step:
            groups = optimizer.param_groups
            self._group_of = {param: group for group in groups for param in group["params"]}
            self._step = step
        # One that no group has any more is not updated.
        of_params = [(param, self._group_of[param]) for param in params if param in self._group_of]
        # Transformer Engine has more by parameter than the state: the scales of its moments.
        attributes, tables = dict(vars(optimizer)), dict[str, _Table]()
        for name, table in attributes.items():
            if isinstance(table, dict):
                by_param = cast("dict[Any, dict[str, Any]]", table)
                found = {param: dict(by_param[param]) for param in params if param in by_param}
                if found or name == "state":
                    tables[name] = found
        return partial(self._preview, unit, of_params, tables, attributes)

    @torch.no_grad()
    def _preview(
        self,
        unit: HZPUnit,
        of_params: list[tuple[torch.nn.Parameter, dict[str, Any]]],
        tables: "dict[str, _Table]",
        attributes: dict[str, Any],
        values: torch.Tensor,
    ) -> None:
        main, grads = unit.main_param.storage, unit.main_grad.view(unit.optim_range)
        if (inverse := self._inverse_scale()) is not None:
            grads = grads.clone()
            found: torch.Tensor = torch.zeros(1, device=grads.device)
            torch._amp_foreach_non_finite_check_and_unscale_([grads], found, inverse)  # pyright: ignore
        groups: dict[int, dict[str, Any]] = {}
        copy_of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for param, group in of_params:
            start = (param.data_ptr() - main.data_ptr()) // FP32_NBYTES
            copy = copy_of[param] = torch.nn.Parameter(values[start : start + param.numel()])
            give_grad(copy, grads[start : start + param.numel()])
            if id(group) not in groups:
                settings = {key: group[key] for key in list(group) if key != "params"}
                groups[id(group)] = {**_copied(settings), "params": []}
            groups[id(group)]["params"].append(copy)
        if groups:
            own_tables: dict[str, _Table] = {
                name: {copy_of[one]: _copied(table[one]) for one in copy_of if one in table}
                for name, table in tables.items()
            }
            _step_on(type(self._optimizer), attributes, list(groups.values()), own_tables)


_Table = dict[Any, dict[str, Any]]
"""What an optimizer keeps by parameter."""


def step_beside(
    optimizer: torch.optim.Optimizer, of_params: Sequence[tuple[torch.nn.Parameter, dict[str, Any]]]
) -> None:
    """Update some parameters, each with its group, as a step of `optimizer` would that comes next
    and finds no gradient of them: it counts that step."""
    groups: dict[int, dict[str, Any]] = {}
    for param, group in of_params:
        if id(group) not in groups:
            settings = {key: group[key] for key in group if key != "params"}
            groups[id(group)] = {**_copied(settings), "params": []}
        groups[id(group)]["params"].append(param)
    _step_on(type(optimizer), dict(vars(optimizer)), list(groups.values()), {})


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _step_on(
    kind: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    groups: list[dict[str, Any]],
    tables: dict[str, _Table],
) -> None:
    """A step of an optimizer of class `kind` with `attributes` and, in their place, `groups` and
    `tables`, of some of its parameters or copies of them; without the hooks that were put on it."""
    other = object.__new__(kind)
    other.__dict__.update(attributes)
    other.__dict__.pop("step", None)  # a learning rate scheduler counts calls there
    for name, table in tables.items():
        other.__dict__[name] = defaultdict[Any, dict[str, Any]](dict, table)
    other.param_groups = groups
    other.__dict__ |= {hooks: OrderedDict[int, Any]() for hooks in _HOOKS}
    # torch wraps the step of a class once, for hooks of all optimizers: they are not for a copy.
    step: Any = kind.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(other)
