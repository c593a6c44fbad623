# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's part of a checkpoint.

[Note: one checkpoint for every optimizer]
Megatron's optimizers store main parameters and moments under the same keys
(`optimizer.state.exp_avg.<parameter>`, ...), as do we. They differ in where they look for the state
that all ranks share:

    FP32Optimizer                     state.common_step, param_groups
    Float16OptimizerWithFloat16Params optimizer.state.common_step, optimizer.param_groups
    DistributedOptimizer              optimizer.param_groups[i].step, param_state_sharding_type
    ChainedOptimizer                  one of these for dense parameters, one for experts

We write all of them, a few hundred bytes, and read whichever is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isclose
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import param_group_identifier_keys as _IDENTITY

from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.operation import current_save, is_shared_load
from megatron_asynchzp.mcore.checkpoint.save_ranks import (
    Held,
    broadcast_to_replicas,
    held_part,
    is_read_here,
    runs_to_write,
)
from megatron_asynchzp.mcore.checkpoint.shards import SHARDS_KEY, ChunkCheckpoint, fill
from megatron_asynchzp.mcore.run.settings import run_args

# Those that count steps per parameter.
TORCHS_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_SHARDING_TYPE = "fully_reshardable"
_OWN_KEY = "asynchzp"
_MAIN_PARAM = "fp32_param"
_RECORDS_KEY = "asynchzp_grad_records"
_SHARDING_TYPE_KEY = "distrib_optim_sharding_type"
# What Megatron's scheduler reads in a group, what it writes there, and whether the rate is the
# run's own.
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd", "lr", "weight_decay", "default_config")
_STRUCTURE = tuple(key for key in _IDENTITY if key not in _SCHEDULE)


class ScheduleRule(Enum):
    """Whose schedule a group has after a load: both, which must be equal, or a flag's choice."""

    EQUAL = "equal"
    OF_RUN = "--override-opt-param-scheduler"
    OF_CHECKPOINT = "--use-checkpoint-opt-param-scheduler"


class FragmentPlace(NamedTuple):
    """The parameter of a fragment: number `index` of `unit`."""

    checkpoint: ChunkCheckpoint
    unit: HZPUnit
    index: int


@dataclass
class OptimizerCheckpoint:
    """Writes and reads the state of `optimizers`, whose parameters are the fragments in `places`.

    state has all of their states by fragment, grad_scaler is that of an fp16 run, chunks are all of
    this rank.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    state: Mapping[torch.nn.Parameter, dict[str, Any]]
    grad_scaler: MegatronGradScaler | None
    places: Mapping[torch.nn.Parameter, FragmentPlace]
    chunks: Sequence[ChunkCheckpoint]

    def __post_init__(self):
        self._asked: dict[str, Any] = {}
        self._is_spread = False

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    # ---- writing, and asking

    def sharded_state_dict(
        self, is_loading: bool, metadata: dict | None, grad_records: Sequence[Sequence[str]] = ()
    ) -> dict[str, Any]:
        """Return entries for this rank's main parameters and moments, and the common part.

        Called after the chunks' `sharded_state_dict`. metadata is Megatron's of the format, to
        which a save adds the distributed optimizer's entry. grad_records are Communication's, equal
        on all ranks.
        """
        metadata = {} if metadata is None else metadata
        if is_loading:
            _check_has_no_buckets(metadata)
            is_distributed = _SHARDING_TYPE_KEY in metadata and _OWN_KEY not in metadata
            main_param = "param" if is_distributed else _MAIN_PARAM
        else:
            save = current_save()
            if save is None or not save.is_local:  # Megatron refuses local ones of any such type
                metadata |= {_SHARDING_TYPE_KEY: _SHARDING_TYPE, _OWN_KEY: True}
            main_param = _MAIN_PARAM
        self._is_spread = is_loading and is_shared_load()
        shards = list(self._shards(main_param))
        self._asked = {str(i): shard.data for i, shard in enumerate(shards)}
        return self._common(grad_records) | self.chunks[0].as_state(shards)

    def _shards(self, main_param: str) -> Iterator[ShardedTensor]:
        states = {
            unit: state for unit, state in self._held(main_param).items() if is_read_here(unit)
        }
        chunk_of = {unit: chunk for chunk in self.chunks for unit in chunk.units}
        for unit, name, held in runs_to_write(states):
            yield from chunk_of[unit].shards_of(unit, held, f"optimizer.state.{name}.")

    def _held(self, main_param: str) -> dict[HZPUnit, dict[str, list[Held]]]:
        """Return this rank's part of each trained unit, by state; equally ordered on replicas."""
        states: dict[HZPUnit, dict[str, list[Held]]] = {
            unit: {} for chunk in self.chunks for unit in chunk.units if unit.is_trained
        }
        for fragment, (checkpoint, unit, index) in self.places.items():
            tensors = {
                name: value
                for name, value in self.state.get(fragment, {}).items()
                if torch.is_tensor(value) and value.shape == fragment.shape and name != "step"
            }
            if not unit.is_main_param_aliased:  # else they are the model's parameters
                is_away = unit.is_main_param_away
                values = unit.main_param.elements_of(index)[1] if is_away else fragment.data
                tensors[main_param] = checkpoint.current_values(values)
            for name, values in tensors.items():
                states[unit].setdefault(name, []).append(held_part(unit, index, values))
        return states

    def _common(self, grad_records: Sequence[Sequence[str]]) -> dict[Any, Any]:
        # One form for each optimizer that a stock run has: of Muon, of Adam, and for experts.
        groups_of: dict[tuple[int, bool], list[dict[str, Any]]] = {}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                place = number, bool(group.get("is_expert_parallel", False))
                saved = {key: value for key, value in group.items() if key != "params"}
                groups_of.setdefault(place, []).append(saved)
        forms = [self._form(groups) for _, groups in sorted(groups_of.items())]
        if grad_records:
            forms[0][_RECORDS_KEY] = grad_records
        return forms[0] if len(forms) == 1 else dict(enumerate(forms))

    def _form(self, groups: list[dict]) -> dict[str, Any]:
        step = None if any(_has_momentum(group) for group in groups) else self._step()
        # Fused ones, which count per group, would take a parameter's count for a moment.
        is_common = any(isinstance(optimizer, TORCHS_ADAM) for optimizer in self.optimizers)
        common = {"common_step": step} if is_common and step is not None else {}
        if step is not None:
            groups = [{**group, "step": int(step)} for group in groups]
        form = {
            "state": dict(common),
            "param_groups": groups,
            "optimizer": {"state": dict(common), "param_groups": groups},
            "param_state_sharding_type": _SHARDING_TYPE,
        }
        if self.grad_scaler is not None:
            form["grad_scaler"] = self.grad_scaler.state_dict()
        return form

    def _step(self) -> torch.Tensor | int | None:
        """Return the steps taken, by parameter or (fused) by group, or None without Adam."""
        for state in self.state.values():
            if "step" in state:
                return torch.as_tensor(state["step"], device="cpu")
        counting = [group for group in self._param_groups if not _has_momentum(group)]
        none_yet = 0 if any(group["params"] for group in counting) else None
        return next((group["step"] for group in counting if "step" in group), none_yet)

    # ---- reading

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping) -> None:
        """Take over what was read. Raises ConfigurationError for groups or a state that differ."""
        fill(self._asked, state_dict.get(SHARDS_KEY, {}))
        self._asked = {}
        if self._is_spread:
            for unit, held in self._held(_MAIN_PARAM).items():
                for _, parts in sorted(held.items()):
                    broadcast_to_replicas(unit, [part.values for part in parts])
        forms = _forms(state_dict)
        self._load_groups([group for form in forms for group in _groups_of(form)])
        steps = [step for form in forms if (step := _step_of(form)) is not None]
        self._load_step(steps[0] if steps else None)
        if self.grad_scaler is not None and "grad_scaler" in forms[0]:
            self.grad_scaler.load_state_dict(forms[0]["grad_scaler"])

    @staticmethod
    def grad_records_in(state_dict: Mapping) -> Sequence[Sequence[str]]:
        return _forms(state_dict)[0].get(_RECORDS_KEY, ())

    def _load_groups(self, saved: Sequence[dict]) -> None:
        rule, args = ScheduleRule.EQUAL, run_args()
        if args is not None and args.override_opt_param_scheduler:
            rule = ScheduleRule.OF_RUN
        elif args is not None and args.use_checkpoint_opt_param_scheduler:
            rule = ScheduleRule.OF_CHECKPOINT
        kept = {"params", "step", *(_SCHEDULE if rule is ScheduleRule.OF_RUN else ())}
        groups = self._param_groups
        for group, loaded in zip(groups, pair_groups(groups, saved, rule), strict=True):
            group.update({k: v for k, v in loaded.items() if k not in kept})

    def _load_step(self, step: torch.Tensor | int | None) -> None:
        if step is None:
            if all(_has_momentum(group) for group in self._param_groups):
                return
            # Adam would correct the moments as if they were those of its first step.
            raise ConfigurationError(
                "the checkpoint does not tell after how many steps its moments were saved; pass "
                "--no-load-optim to start with new ones"
            )
        for optimizer in self.optimizers:
            is_torchs = isinstance(optimizer, TORCHS_ADAM)
            for group in optimizer.param_groups:
                if is_torchs:
                    for fragment in group["params"]:
                        # Each its own, and where torch's fused kernel wants it.
                        own_step = torch.tensor(float(step), device=fragment.device)
                        self.state[fragment]["step"] = own_step
                elif not _has_momentum(group):
                    group["step"] = int(step)


def _has_momentum(group: Mapping) -> bool:
    return "momentum" in group


def _check_has_no_buckets(metadata: Mapping) -> None:
    kind = metadata.get(_SHARDING_TYPE_KEY, _SHARDING_TYPE)
    if kind != _SHARDING_TYPE:
        raise ConfigurationError(
            f"the checkpoint holds the optimizer state in the form {kind!r}, which only runs of "
            "the same kind can read; save it once more from its own run with "
            "--dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
        )


def pair_groups(
    groups: Sequence[Mapping], saved: Sequence[Mapping], rule: ScheduleRule
) -> list[Mapping]:
    """Return the saved parameter group that belongs to each of `groups`.

    Settings that separate groups pair them. Megatron's identity of a group also has its schedule,
    which another --lr changes: it counts under EQUAL alone. Groups that differ in nothing else are
    paired by the run's own rate, or, if several, if all rates are the saved ones times a common
    factor. Raises ConfigurationError for a group with no partner, or with several.
    """
    return [_partner(group, groups, saved, rule) for group in groups]


def _partner(
    group: Mapping, groups: Sequence[Mapping], saved: Sequence[Mapping], rule: ScheduleRule
) -> Mapping:
    mine, theirs = (
        [candidate for candidate in side if _structure(candidate) == _structure(group)]
        for side in (groups, saved)
    )
    if not theirs:
        raise ConfigurationError(
            f"the checkpoint has no parameter group with {_described(group, _STRUCTURE)}; resume "
            "with the flags it was saved with, or pass --no-load-optim"
        )
    if rule is ScheduleRule.EQUAL:
        same = [candidate for candidate in theirs if _identity(candidate) == _identity(group)]
        if not same:
            raise ConfigurationError(
                f"the checkpoint has no parameter group with {_described(group, _IDENTITY)}; add "
                "--override-opt-param-scheduler to go by this run's flags, or "
                "--use-checkpoint-opt-param-scheduler to go by the checkpoint's"
            )
        return same[0]
    if rule is ScheduleRule.OF_RUN and len({_settings(candidate) for candidate in theirs}) == 1:
        return theirs[0]  # no schedule is taken from it
    if all("default_config" in candidate for candidate in (*mine, *theirs)):
        is_default = group["default_config"]
        mine, theirs = ([g for g in s if g["default_config"] == is_default] for s in (mine, theirs))
    mine, theirs = sorted(mine, key=_rates), sorted(theirs, key=_rates)
    if len(mine) != len(theirs) or (
        len(mine) > 1
        and not all(map(_are_proportional, zip(*map(_rates, mine)), zip(*map(_rates, theirs))))
    ):
        raise ConfigurationError(
            f"the checkpoint has {len(theirs)} parameter groups for {len(mine)} of this run with "
            f"{_described(group, _STRUCTURE)}, and their rates do not tell which is which; resume "
            "with the rates it was saved with, or pass --no-load-optim"
        )
    return theirs[next(i for i, candidate in enumerate(mine) if candidate is group)]


def _are_proportional(some: Sequence[float], others: Sequence[float]) -> bool:
    largest, partner = max(some), max(others)
    return all(isclose(a * partner, b * largest, rel_tol=1e-6) for a, b in zip(some, others))


def _rates(group: Mapping) -> tuple[float, ...]:
    return tuple(float(group.get(key) or 0) for key in ("max_lr", "min_lr"))


def _settings(group: Mapping) -> str:
    """Return the settings of a group that belong neither to a schedule nor to a run."""
    left_out = {"params", "step", *_SCHEDULE}
    return repr(sorted((key, value) for key, value in group.items() if key not in left_out))


def _value(group: Mapping, key: str) -> Any:
    return group.get(key, group.get(f"pre_{key}"))


def _identity(group: Mapping) -> tuple:
    """Return the settings that make two parameter groups the same one for Megatron."""
    return tuple(_value(group, key) for key in _IDENTITY)


def _structure(group: Mapping) -> tuple:
    return (_has_momentum(group), *(_value(group, key) for key in _STRUCTURE))


def _described(group: Mapping, keys: Sequence[str]) -> str:
    return ", ".join(
        f"{key} {_value(group, key)}" for key in keys if _value(group, key) is not None
    )


def _forms(state_dict: Mapping) -> list[Mapping]:
    chained = [state_dict[key] for key in sorted(k for k in state_dict if isinstance(k, int))]
    return chained or [state_dict]


def _groups_of(form: Mapping) -> list[dict]:
    return form["param_groups"] if "param_groups" in form else form["optimizer"]["param_groups"]


def _step_of(form: Mapping) -> torch.Tensor | int | None:
    inner = form if "param_groups" in form else form["optimizer"]
    step = inner.get("state", {}).get("common_step")
    if step is None:
        step = next((group["step"] for group in _groups_of(form) if "step" in group), None)
    return step
