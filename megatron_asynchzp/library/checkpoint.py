# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A sharded model's checkpoint: the parts that a rank saves, and how it loads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.engine.comm.agreement import settings_of_group, text_of
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.fragments import HeldFragment, TrainedFragment
from megatron_asynchzp.library.parts import plain
from megatron_asynchzp.library.state import NOT_THERE, AbsentState, ShardedState
from megatron_asynchzp.library.states import (
    StateKind,
    creates_states_in_first_step,
    kinds_of_states,
    optimizers_within,
)
from megatron_asynchzp.library.whole_values import saved_buffers

_OWN_KEYS = {"model", "optim", "grad_record", "param_groups", "optim_keys"}
_PARAMS = "params"
"""In a saved group, the key of its parameters' names."""


@dataclass(frozen=True, eq=False)
class ModelCheckpoint:
    """Makes and loads the state of ShardedModel.state_dict."""

    model: nn.Module
    runtime: HZPRuntime
    optimizer: torch.optim.Optimizer
    parts: Sequence[HeldFragment]  # all that this rank has
    is_first: bool  # whether this rank saves what all ranks have

    @property
    def _trained(self) -> list[TrainedFragment]:
        return [part for part in self.parts if isinstance(part, TrainedFragment)]

    def state_dict(self, only_trained: bool) -> dict[str, Any]:
        """Return the state. Nothing may be in flight, unless the model is asleep."""
        state: dict[str, Any] = {
            f"model.{part.name}": part.state_of(self.runtime.current_values(part.values))
            for part in (self._trained if only_trained else self.parts)
            if part.held.numel
        }
        _refuse_inner_states(self.optimizer)
        kinds = self._kinds()
        for part in self._trained:
            own = self.optimizer.state.get(part.param, {})
            for key, kind in kinds.get(part.param, {}).items() if part.held.numel else ():
                is_there = key in own
                place = _place_of(part, key, own[key], kind) if is_there else _absent(part, kind)
                state[f"optim.{part.name}.{key}"] = place
        for name, buffer in saved_buffers(self.model):
            values = buffer.detach().reshape(-1)
            whole = ShardedState(buffer.shape, Range(0, buffer.numel()), values)
            whole.is_written = self.is_first
            state[f"model.{name}"] = whole
        state["grad_record"] = self.runtime.budgets.grad_record()
        # Tuples: torch.distributed.checkpoint flattens dicts and lists, whose keys must then match.
        state["param_groups"] = tuple(
            {**_settings_of(group), _PARAMS: self._names_in(group)}
            for group in self.optimizer.param_groups
        )
        state["optim_keys"] = tuple(
            (part.name, *self.optimizer.state.get(part.param, {})) for part in self._trained
        )
        return state

    def extra(self, extra: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the caller's tensors of trained parameters, to be saved as parts."""
        parts, state = {part.name: part for part in self._trained}, dict[str, Any]()
        for key, tensors in extra.items():
            for name, tensor in tensors.items():
                part = parts.get(name)
                if problem := _problem_of_extra(key, tensor, part):
                    raise ConfigurationError(f"extra[{key!r}][{name!r}] {problem}")
                if part is not None and part.held.numel:
                    state[f"{key}.{name}"] = part.state_of(plain(tensor.detach()))
        return state

    def _kinds(self) -> dict[nn.Parameter, dict[str, StateKind]]:
        """Return the kinds of states that the optimizer keeps of each parameter, now or later."""
        kinds: dict[nn.Parameter, dict[str, StateKind]] = {}
        states, tried = self.optimizer.state, None
        # Unlike a sleeping parameter these keep their shapes.
        values: dict[Any, torch.Tensor] = {part.param: part.values for part in self._trained}
        for index, group in enumerate(self.optimizer.param_groups):
            found: dict[str, StateKind] = {}
            params: list[nn.Parameter] = group["params"]
            for param in params:
                for key, value in states.get(param, {}).items():
                    found[key] = StateKind.of(value, values.get(param, param))
            if not (found and creates_states_in_first_step(self.optimizer)):
                tried = kinds_of_states(self.optimizer) if tried is None else tried
                found |= tried[index]  # a parameter of one element cannot tell the kind
            kinds |= dict.fromkeys(params, found)
        return kinds

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`; raise ConfigurationError if it is no state_dict() of this object."""
        if missing := {"param_groups", "grad_record", "optim_keys"} - state.keys():
            raise ConfigurationError(
                f"the state has no {sorted(missing)[0]}. Pass a state_dict() of this object into "
                "which torch.distributed.checkpoint.load has read; a whole state dict of the model "
                "goes into sharded.model.load_state_dict()"
            )
        frozen = (one for one in self.parts if not isinstance(one, TrainedFragment))
        has_frozen = any(f"model.{part.name}" in state for part in frozen)
        asked = self.parts if has_frozen else self._trained
        if not all(_is_place_of(part, state) for part in asked if part.held.numel):
            raise ConfigurationError(
                "the state is from before the last sleep() or wake(): call state_dict() again, "
                "after wake(), and load into that"
            )
        kinds = self._kinds()
        self._refuse_unknown_states(state, kinds)
        all_settings = self._settings_saved(state["param_groups"])
        for group, saved in zip(self.optimizer.param_groups, all_settings, strict=True):
            _take_settings(group, saved)
        for part in self._trained:
            if not part.held.numel:  # its states are empty
                continue
            own = dict(self.optimizer.state.get(part.param, {}))
            for key, kind in kinds.get(part.param, {}).items():
                found = state.get(f"optim.{part.name}.{key}", NOT_THERE)
                if isinstance(found, AbsentState):
                    shape = found.values.shape if kind.per == "element" else kind.shape
                    found = found.values.view(shape) if found.is_loaded else NOT_THERE
                if isinstance(found, str) and found == NOT_THERE:
                    own.pop(key, None)
                elif not isinstance(found, ShardedState):  # which was loaded in place
                    own[key] = found
            if own:
                self.optimizer.state[part.param] = own
            else:
                self.optimizer.state.pop(part.param, None)
        for name, buffer in saved_buffers(self.model):
            buffer.copy_(state[f"model.{name}"].values.view(buffer.shape))
        self.runtime.budgets.expect_grads(state["grad_record"], self.runtime.units)
        for unit in self.runtime.units:
            if not unit.is_trained:
                unit.marks.note_rewritten()  # sync_params casts the others
        self.runtime.sync_params()
        self.runtime.settle()

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        names: dict[Any, str] = {part.param: part.name for part in self._trained}
        return [names[param] for param in group["params"] if param in names]

    def _settings_saved(self, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the saved settings of each group's parameters, in this optimizer's order."""
        groups = self.optimizer.param_groups
        group_of = {name: one for one in saved for name in one.get(_PARAMS, ())}
        chosen: list[Mapping[str, Any]] = []
        for index, group in enumerate(groups):
            known = [group_of[name] for name in self._names_in(group) if name in group_of]
            found = {text_of([*settings_of_group(one).items()]): one for one in known}
            if not found and len(saved) == len(groups):  # an empty group, or an older file
                found[""] = saved[index]
            if len(found) != 1:
                raise ConfigurationError(
                    f"group {index} of the optimizer's {len(groups)} has parameters of "
                    f"{len(found)} groups with other settings among the {len(saved)} saved ones. "
                    "Make the groups that were saved, and change settings after the load"
                )
            chosen += found.values()
        return chosen

    def _refuse_unknown_states(
        self, state: Mapping[str, Any], kinds: Mapping[nn.Parameter, Mapping[str, StateKind]]
    ) -> None:
        saved = {name: keys for name, *keys in state["optim_keys"]}
        for part in self._trained:
            known = kinds.get(part.param, {})
            for key in saved.get(part.name, ()):
                if key not in known:
                    raise ConfigurationError(
                        f"the checkpoint has a state {key!r} of {part.name}, but "
                        f"{type(self.optimizer).__name__} keeps {', '.join(known) or 'none'}. Load "
                        "it with the optimizer and the settings of the run that saved it"
                    )


def _problem_of_extra(key: str, tensor: torch.Tensor, part: TrainedFragment | None) -> str | None:
    """Return why `tensor` cannot be saved by `key` as values of `part`."""
    if key.partition(".")[0] in _OWN_KEYS:
        return f"has a key of sharded.state_dict() itself; replace {key!r}, for example by 'ema'"
    if part is None:
        return (
            "does not name a trained parameter; use the names of "
            'sharded.optimizer.param_groups[0]["param_names"]'
        )
    if tensor.shape != (part.held.numel,):
        return (
            f"has shape {tuple(tensor.shape)}; it has to have one value for each of the "
            f"{part.held.numel} elements of this rank's part, as sharded.optimizer's parameter"
        )
    return None


def _refuse_inner_states(optimizer: torch.optim.Optimizer) -> None:
    for name, inner in optimizers_within(optimizer):
        if inner.state is not optimizer.state and any(inner.state.values()):
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps states in its attribute .{name}, an optimizer "
                "whose states a checkpoint would lose. Let both share one `state`, or use one "
                "optimizer with groups"
            )


def _place_of(part: TrainedFragment, key: str, value: Any, kind: StateKind) -> Any:
    """`value`, a state of `part`, for a checkpoint."""
    if kind.per == "element" and value.shape == part.values.shape:
        return part.state_of(plain(value))
    if kind.per in ("element", "other"):
        raise ConfigurationError(
            f"the optimizer's state {key!r} of {part.name} has shape {tuple(value.shape)} for the "
            f"{part.held.numel} elements that this rank has. A checkpoint for any sizes needs one "
            "value per element: use an optimizer that keeps one"
        )
    return value


def _absent(part: TrainedFragment, kind: StateKind) -> Any:
    """Return a placeholder for a state that `part` does not have."""
    if kind.per == "element":
        # A state is on the device of its main parameters.
        nothing = torch.empty(0, dtype=kind.dtype, device=part.values.device)
        return AbsentState(part.shape, part.held, nothing)
    if kind.per == "parameter":
        return AbsentState(
            kind.shape, Range(0, 1), torch.empty(0, dtype=kind.dtype, device=kind.device)
        )
    return NOT_THERE


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in settings_of_group(group).items()
    }


# What torch's schedulers put into a group when they are made.
_OF_SCHEDULERS = {
    "initial_lr",
    *("max_lr", "min_lr", "base_momentum", "max_momentum"),  # OneCycleLR, CyclicLR
    "swa_lr",
}


def _take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the saved settings; drop all others, except those that a scheduler has set."""
    saved = settings_of_group(saved)
    for key in settings_of_group(group).keys() - saved.keys() - _OF_SCHEDULERS:
        del group[key]
    for key, value in saved.items():
        before = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
            before.copy_(value)
        elif isinstance(value, torch.Tensor) and group.get("capturable"):
            group[key] = value.to(group["params"][0].device)
        else:
            group[key] = value


def _is_place_of(part: HeldFragment, state: Mapping[str, Any]) -> bool:
    """Whether loading into `state` has written the values of `part`."""
    found = state.get(f"model.{part.name}")
    return isinstance(found, ShardedState) and found.values.data_ptr() == part.values.data_ptr()
