# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint that a rank saves and loads, and whole values that it takes over."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.engine.comm.agreement import settings_of_group, text_of
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.unit import Fragment
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.grads import plain
from megatron_asynchzp.library.optimizer import (
    StateKind,
    creates_states_in_first_step,
    kinds_of_states,
    optimizers_within,
)
from megatron_asynchzp.library.state import NOT_THERE, AbsentState, ShardedState

_OWN_KEYS = {"model", "optim", "grad_record", "param_groups", "optim_keys"}
_PARAMS = "params"
"""In a saved group, the key of its parameters' names."""


@dataclass(frozen=True, eq=False)
class ModelCheckpoint:
    """Makes and loads the state of ShardedModel.state_dict."""

    model: nn.Module
    runtime: HZPRuntime
    optimizer: torch.optim.Optimizer
    parts: Sequence[Fragment]  # all that this rank has
    is_first: bool  # whether this rank saves what all ranks have

    @property
    def _trained(self) -> list[Fragment]:
        return [part for part in self.parts if part.unit.is_trained]

    def state_dict(self, only_trained: bool) -> dict[str, Any]:
        """Return the state. Nothing may be in flight, unless the model is asleep."""
        state: dict[str, Any] = {
            f"model.{part.name}": _state_of(part, self.runtime.current_values(part.values))
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
                    state[f"{key}.{name}"] = _state_of(part, plain(tensor.detach()))
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
        frozen = (one for one in self.parts if not one.unit.is_trained)
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


def _state_of(part: Fragment, values: torch.Tensor) -> ShardedState:
    return ShardedState(part.shape, part.held, values)


def _problem_of_extra(key: str, tensor: torch.Tensor, part: Fragment | None) -> str | None:
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


def _place_of(part: Fragment, key: str, value: Any, kind: StateKind) -> Any:
    """`value`, a state of `part`, for a checkpoint."""
    if kind.per == "element" and value.shape == part.values.shape:
        return _state_of(part, plain(value))
    if kind.per in ("element", "other"):
        raise ConfigurationError(
            f"the optimizer's state {key!r} of {part.name} has shape {tuple(value.shape)} for the "
            f"{part.held.numel} elements that this rank has. A checkpoint for any sizes needs one "
            "value per element: use an optimizer that keeps one"
        )
    return value


def _absent(part: Fragment, kind: StateKind) -> Any:
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


def _is_place_of(part: Fragment, state: Mapping[str, Any]) -> bool:
    found = state.get(f"model.{part.name}")
    return isinstance(found, ShardedState) and found.values.data_ptr() == part.values.data_ptr()


_WHOLE = "hand over the model's whole state_dict()"
_EXTRA = "_extra_state"


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that torch's own state_dict of `model` would have."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            is_saved = name.rpartition(".")[2] not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if is_saved and buffer.numel():
                yield name, buffer


def loadable_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each parameter and each persistent buffer of `model`, with all its names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for name, buffer in saved_buffers(model):
        names.setdefault(buffer, []).append(name)
    return [(each, tensor) for tensor, each in names.items()]


@torch.no_grad()
def problem_of_values(
    model: nn.Module,
    targets: list[tuple[list[str], torch.Tensor]],
    values: Mapping[str, Any] | None,
) -> str | None:
    """Return why `model`, whose loadable_tensors are `targets`, cannot load `values`, or None."""
    if values is None:
        return f"the source rank has no values; {_WHOLE} there"
    given = set(values)
    for names, target in targets:
        found = [name for name in names if name in given]
        if not found:
            return f"{names[0]} is not among the values; {_WHOLE}"
        first = values[found[0]]
        if (problem := _misfit(found[0], first, target)) is not None:
            return problem
        for other in found[1:]:
            if not _are_same(values[other], first):
                return (
                    f"{found[0]} and {other} are one tensor in the model, but have different "
                    "values here; build the model with separate weights, or leave one of them out"
                )
    empty = {name for name, buffer in model.named_buffers() if not buffer.numel()}
    known = {name for names, _ in targets for name in names} | empty
    for name in sorted(given - known):
        if name.rpartition(".")[2] == _EXTRA:
            return f"{name} is no tensor; call set_extra_state() on every rank, and leave it out"
        if name in dict(model.named_buffers()):
            return f"{name} is a buffer with persistent=False, which is not saved; leave it out"
        return f"{name} is not a parameter or persistent buffer of the model; leave it out"
    return None


def _misfit(name: str, value: Any, target: torch.Tensor) -> str | None:
    """Why `value` cannot become that of `target`."""
    if not isinstance(value, torch.Tensor) or value.is_meta or type(value.data) is not torch.Tensor:
        kind = "on the meta device" if isinstance(value, torch.Tensor) and value.is_meta else ""
        return f"{name} is {kind or f'a {type(value).__name__}'} there; it is to be a whole tensor"
    if value.shape != target.shape:
        return f"{name} has shape {tuple(value.shape)} there, {tuple(target.shape)} in the model"
    if not torch.can_cast(value.dtype, target.dtype) or (
        not target.is_floating_point()
        and not target.is_complex()
        and not torch.equal(value.to(target.dtype).to(value.dtype), value)
    ):
        return f"{name} is {value.dtype} there, {target.dtype} in the model, which cannot hold it"
    return None


def _are_same(one: Any, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return isinstance(one, torch.Tensor) and torch.equal(one.to(other.device), other)
