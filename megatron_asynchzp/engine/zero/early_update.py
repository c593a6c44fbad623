# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the preview of an update, on copies, and the sends before it, until it confirms them."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.sharding.early_units import BackwardRoom, EarlyUnits
from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.engine.zero.taken_grads import give_grad
from megatron_asynchzp.engine.zero.unit import HZPUnit

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
    """Return whether each element is updated from its own gradient and states, as far as known."""
    kind = type(optimizer)
    known = (kind.__module__.partition(".")[0], kind.__name__) in _OF_OTHERS
    return known or kind in _OF_TORCH or getattr(kind, "is_elementwise", False)


class EarlyUpdate:
    """Computes the updates of units before the optimizer's step, so that they can be sent early.

    [Note: early update] An optimizer that clips begins after backward, because the factor needs the
    last gradient. Most steps clip nothing: their factor is exactly 1. So once a unit's gradient is
    complete, its update is computed with factor 1 on copies of its states, and its parameters are
    sent while backward continues. If the factor is 1, the optimizer's own update gives the bits
    that were sent. They are compared ([Note: compared with what was sent]), and differences are
    sent again. No state is written early, so nothing is undone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,  # `is_elementwise` holds
        # For each unit whose gradient nothing changes between its reduction and the clipping, the
        # optimizer's parameters that this rank owns: 1-D views of main_param.
        params_of: Mapping[HZPUnit, Sequence[torch.nn.Parameter]],
        # Send all these units in every step. Otherwise as many as backward has room for, and after
        # three steps in vain only in every 64th.
        is_forced: bool = False,
        # A host that runs ahead of a device waits for the comparison and sends differences again.
        # Otherwise a difference ends the run.
        is_awaited: bool = False,
        # Returns the inverse loss scale, fp32 [1], or None.
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
        # The optimizer's class may have been replaced since.
        if unit not in self._params_of or not is_elementwise(self._optimizer):
            return False
        recent = [number for number in self._outcomes if number != step]
        is_vain = len(recent) == _REMEMBERED and not any(map(self._outcomes.get, recent))
        return self.is_forced or not is_vain or step - recent[-1] >= _UNTIL_NEXT_TRIAL

    def note_outcome(self, step: int, did_stand: bool) -> None:
        """Note whether any early send of a chunk in step `step` equalled the update's result."""
        self._outcomes[step] = self._outcomes.pop(step, False) or did_stand
        while len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def preview_of(self, unit: HZPUnit, step: int) -> Callable[[torch.Tensor], None]:
        """Return a function for a lane's thread that updates a copy of main parameters.

        The main thread collects its inputs here, because it may change them later.
        """
        optimizer, params = self._optimizer, self._params_of[unit]
        if step != self._step:
            groups = optimizer.param_groups
            self._group_of = {param: group for group in groups for param in group["params"]}
            self._step = step
        # A parameter that no group contains any more is not updated.
        of_params = [(param, self._group_of[param]) for param in params if param in self._group_of]
        # Transformer Engine also keeps the scales of moments in a table by parameter.
        attributes, tables = dict(vars(optimizer)), dict[str, _Table]()
        for name, table in attributes.items():
            if isinstance(table, dict):
                by_param = cast("dict[Any, dict[str, Any]]", table)
                entries = {param: dict(by_param[param]) for param in params if param in by_param}
                if entries or name == "state":
                    tables[name] = entries
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
            has_inf: torch.Tensor = torch.zeros(1, device=grads.device)
            torch._amp_foreach_non_finite_check_and_unscale_([grads], has_inf, inverse)  # pyright: ignore
        copy_of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for param, _ in of_params:
            start = (param.data_ptr() - main.data_ptr()) // FP32_NBYTES
            copy = copy_of[param] = torch.nn.Parameter(values[start : start + param.numel()])
            give_grad(copy, grads[start : start + param.numel()])
        if of_params:
            own_tables: dict[str, _Table] = {
                name: {copy_of[param]: _copied(table[param]) for param in copy_of if param in table}
                for name, table in tables.items()
            }
            copies = [(copy_of[param], group) for param, group in of_params]
            _step_on(type(self._optimizer), attributes, copies, own_tables)


_Table = dict[Any, dict[str, Any]]
"""What an optimizer keeps by parameter."""


def step_beside(
    optimizer: torch.optim.Optimizer, of_params: Sequence[tuple[torch.nn.Parameter, dict[str, Any]]]
) -> None:
    """Update some parameters, each with its group, as the next step of `optimizer` would."""
    _step_on(type(optimizer), dict(vars(optimizer)), of_params, {})


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _step_on(
    kind: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    of_params: Sequence[tuple[torch.nn.Parameter, dict[str, Any]]],
    tables: dict[str, _Table],
) -> None:
    """Run a step of class `kind` on parameters, each with its group, without hooks put on it."""
    groups: dict[int, dict[str, Any]] = {}
    for param, group in of_params:
        if id(group) not in groups:
            settings = {key: group[key] for key in list(group) if key != "params"}
            groups[id(group)] = {**_copied(settings), "params": []}
        groups[id(group)]["params"].append(param)
    clone = object.__new__(kind)
    clone.__dict__.update(attributes)
    clone.__dict__.pop("step", None)  # a learning rate scheduler counts calls there
    for name, table in tables.items():
        clone.__dict__[name] = defaultdict[Any, dict[str, Any]](dict, table)
    clone.param_groups = list(groups.values())
    clone.__dict__ |= {hooks: OrderedDict[int, Any]() for hooks in _HOOKS}
    # torch wraps the step of a class to run its global hooks, which must not run for a copy.
    step: Any = kind.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(clone)


@dataclass
class _EarlySend:
    # Completes the gradients that `update` reads.
    grads: Task
    # See HZPUnit.preview_param_steps.
    update: Callable[[torch.Tensor], None]
    # Sends the result of `update`; None until it is submitted.
    task: Task | None = None
    # Whether the gradient changed after `update` had read it.
    is_outdated: bool = False


class EarlySends(EarlyUnits[HZPUnit]):
    """The early sends of a chunk: chosen in backward, confirmed by the update.

    main thread  | B u2, choose | B u1, choose |      | optimizer | confirm |
    lanes                  | update and send u2 | update and send u1 |
    """

    def __init__(self) -> None:
        super().__init__()
        # Computes the coming update of a unit; None: no unit is sent early.
        self.early_update: EarlyUpdate | None = None
        self._room = BackwardRoom()
        self._sends: dict[HZPUnit, _EarlySend] = {}

    def choose(self, unit: HZPUnit, grads: Task, step: int) -> bool:
        update = self.early_update
        if update is None or not self.is_allowed or unit in self.units:
            return False
        may_send = update.may_send(unit, step)
        if not self._room.should_send(unit.outer_traffic, may_send, update.is_forced):
            return False
        self._sends[unit] = _EarlySend(grads, update.preview_of(unit, step))
        return True

    def send_of(self, unit: HZPUnit) -> _EarlySend:
        return self._sends[unit]

    def note_grads(self, unit: HZPUnit) -> None:
        """Note that the gradient of `unit` is complete; an earlier send has read less of it."""
        if unit in self.units:
            self._sends[unit].is_outdated = True

    def await_send(self, unit: HZPUnit) -> None:
        if (send := self._sends.get(unit)) is not None and send.task is not None:
            send.task.wait()

    def await_all(self) -> None:
        for unit in self._sends:
            self.await_send(unit)

    @property
    def current_units(self) -> list[HZPUnit]:
        """The units that were sent with all of their gradients."""
        return [unit for unit in self.units if not self._sends[unit].is_outdated]

    def note_outcome(self, step: int, did_stand: bool) -> None:
        if self.early_update is not None and self.current_units:
            self.early_update.note_outcome(step, did_stand)

    def forget(self) -> None:
        self.units.clear()
        self._sends.clear()
        self._room = BackwardRoom()
