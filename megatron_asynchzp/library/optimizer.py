# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer of this rank's parts, and guards it against uses that need whole ones.

Owns which optimizers work on parts of parameters, and which states they keep.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.comm.agreement import settings_of_group
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.early_update import is_elementwise
from megatron_asynchzp.engine.zero.guard import SHARDED_AS
from megatron_asynchzp.engine.zero.unit import Fragment
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.grads import ShardTensor, plain, refuse_whole_states, whole_shapes
from megatron_asynchzp.library.inference import outside_inference
from megatron_asynchzp.library.params import refuse_copies

_COUNTING = "Adam AdamW NAdam RAdam Adamax Adadelta RMSprop Rprop ASGD"
_COUNT = "step"
_OF_TORCH = [getattr(torch.optim, name) for name in f"{_COUNTING} SGD Adagrad".split()]
_OF_OTHERS = {
    ("schedulefree", "AdamWScheduleFree"),
    ("schedulefree", "RAdamScheduleFree"),
    ("schedulefree", "SGDScheduleFree"),
    ("lion_pytorch", "Lion"),
}
_OF_MATRICES = ("muon", "shampoo", "soap")
_MUON = "; Muon on whole matrices is Megatron's --optimizer muon"
_NUM_STEPS = 32  # some make a state after a warmup
_NUM_OF_BLOCKS = 5000  # from 4096 elements on bitsandbytes has states of 8 bits


@dataclass(frozen=True)
class StateKind:
    """The kind of a parameter's state."""

    per: str  # 'element', 'parameter' (a tensor of one value), 'value' (no tensor) or 'other'
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any, param: torch.Tensor) -> "StateKind":
        if not isinstance(value, torch.Tensor):
            return cls("value")
        if value.shape == param.shape:
            per = "element"
        else:
            per = "parameter" if value.numel() == 1 else "other"
        return cls(per, value.dtype, value.device, tuple(value.shape))


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is not known to update each element by itself.

    The contract: a class of torch's, one that keeps the step() of such a class, a class of a named
    list, or one that says `is_elementwise = True`.
    """
    kind = type(optimizer)
    if kind in _OF_TORCH:
        return
    steps = [inspect.unwrap(known.step) for known in _OF_TORCH]
    is_known = (kind.__module__.partition(".")[0], kind.__name__) in _OF_OTHERS
    if not (is_known or is_elementwise(optimizer) or inspect.unwrap(kind.step) in steps):
        is_of_matrices = any(name in kind.__name__.lower() for name in _OF_MATRICES)
        raise ConfigurationError(
            f"{kind.__name__} is not known to update each element from that element's gradient and "
            "states alone, and each rank has a part of each parameter. Take AdamW, SGD or another "
            "of torch's that does, or set is_elementwise = True in the class if that is certain"
            f"{_MUON if is_of_matrices else ''}"
        )
    for kinds in kinds_of_states(optimizer, _NUM_OF_BLOCKS):
        for key, state in kinds.items():
            if state.per == "other":
                raise ConfigurationError(
                    f"{kind.__name__} keeps a state {key!r} of shape {state.shape}, not one value "
                    "per element of a parameter, so a checkpoint could not load into other sizes. "
                    "Take an optimizer that keeps one value per element"
                )


def may_send_early(optimizer: torch.optim.Optimizer, schedule: ScheduleConfig) -> bool:
    """Return whether units may be sent before the update; refuse early_update="on" if not."""
    within = optimizers_within(optimizer)  # a preview would step them
    if schedule.may_send_early and not within and is_elementwise(optimizer):
        return True
    if schedule.early_update == "on":
        raise ConfigurationError(
            f"early_update='on': {type(optimizer).__name__} is not known to update each element "
            "from that element alone; take torch.optim.AdamW, Adam or SGD, or leave early_update "
            "out"
        )
    return False


def creates_states_in_first_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is known to make all its states in its first step."""
    return type(optimizer) in _OF_TORCH


def refuse_early_states(optimizer: torch.optim.Optimizer, param: nn.Parameter, name: str) -> None:
    """Refuse a state of the caller with which torch's optimizer would create none itself."""
    state = optimizer.state.get(param)
    if state and _COUNT not in state and type(optimizer).__name__ in _COUNTING.split():
        raise ConfigurationError(
            f"sharded.optimizer.state of {name} has {sorted(state)[0]!r} before its first update, "
            f"so {type(optimizer).__name__} would not make its own states. Keep it in your own "
            "dict, or set it after the first step"
        )


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.optim.Optimizer]]:
    """Return the other optimizers that `optimizer` has, with its attributes' names."""
    leaves = [
        (name, leaf) for name, value in vars(optimizer).items() for leaf in tree_leaves(value)
    ]
    return [
        (name, leaf)
        for name, leaf in leaves
        if isinstance(leaf, torch.optim.Optimizer) and leaf is not optimizer
    ]


def kinds_of_states(optimizer: torch.optim.Optimizer, numel: int = 7) -> list[dict[str, StateKind]]:
    """Return by group and key the states of a parameter of `numel` elements.

    A copy of the optimizer takes a few steps; a class that cannot be copied has none.
    """
    try:
        return _states_of_copy(optimizer, numel)
    except Exception:  # a class may raise anything
        return [{} for _ in optimizer.param_groups]


@torch.no_grad()
def _states_of_copy(optimizer: torch.optim.Optimizer, numel: int) -> list[dict[str, StateKind]]:
    memo: dict[int, Any] = {}
    params: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        params.append(nn.Parameter(torch.ones(numel, device=device)))
        memo |= {id(param): params[-1] for param in group["params"]}
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if not callable(value) and not key.startswith("_optimizer_") and key != "state"
    }
    copy: Any = object.__new__(type(optimizer))
    hooks = [key for key in vars(optimizer) if key.startswith("_optimizer_")]
    vars(copy).update({key: OrderedDict() for key in hooks}, state=defaultdict(dict))
    vars(copy).update(deepcopy({key: own[key] for key in own if key != "param_groups"}, memo))
    copy.param_groups = [
        {**deepcopy(settings_of_group(group), memo), "params": [param]}
        for group, param in zip(optimizer.param_groups, params, strict=True)
    ]
    if callable(start := getattr(copy, "train", None)):
        start()  # Schedule-Free requires it
    step: Any = type(copy).step  # without the hooks that torch puts around it
    devices = [param.device for param in params if param.device.type != "cpu"][:1]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        for _ in range(_NUM_STEPS):
            for param in params:
                param.grad = torch.ones_like(param)
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(copy)
    return [
        {key: StateKind.of(value, param) for key, value in copy.state.get(param, {}).items()}
        for param in params
    ]


NewOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer of (name, parameter) pairs, as torch's optimizers take them."""

_HELD = "asynchzp_held"
"""The key of an optimizer's state_dict() for the elements it has: (parameter, start, stop)."""


def guarded_optimizer(
    new_optimizer: NewOptimizer, trained: Sequence[Fragment], device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer of `trained`; it refuses calls that would work on parts alone."""
    named = [(part.name, part.param) for part in trained]
    if not named:  # a frozen model; torch's optimizers refuse an empty list
        named = [("nothing", nn.Parameter(torch.zeros(0, device=device)))]
    with whole_shapes({part.param: part.shape for part in trained}):
        optimizer = new_optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer returned a {type(optimizer).__name__}; it is to return an optimizer of "
            "torch, as lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS calls the model within its step, with this rank's parameters alone; take an "
            "optimizer that needs gradients only, as torch.optim.AdamW"
        )
    known = {param for _, param in named}
    if any(param not in known for group in optimizer.param_groups for param in group["params"]):
        raise ConfigurationError(
            "the optimizer has parameters that shard() did not hand over. Make it of the pairs "
            "that its function gets, and another optimizer for parameters outside of the model"
        )
    if trained:
        refuse_optimizer(optimizer)
    attributes = cast("Any", optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigurationError(
            f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its "
            "steps have no hooks. Call super().__init__(params, defaults)"
        )
    attributes._patch_step_function()  # again, as the class may have replaced it
    attributes.add_param_group = _refuse_new_group
    attributes.__reduce_ex__ = refuse_copies
    held = [(part.name, part.held.start, part.held.stop) for part in trained]
    optimizer.register_state_dict_pre_hook(refuse_whole_states)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update({_HELD: held}))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: _refuse_other_parts(state, held))
    return optimizer


@outside_inference()
def make_writable(optimizer: torch.optim.Optimizer) -> None:
    """Replace the states and settings that were made in inference mode, by an update or a load."""
    tables: list[dict[str, Any]] = [*optimizer.state.values(), *optimizer.param_groups]
    for table in tables:
        for key, value in table.items():
            if isinstance(value, torch.Tensor) and value.is_inference():
                table[key] = value.clone()


def make_states_plain(optimizer: torch.optim.Optimizer) -> None:
    """Make states plain tensors, if a training loop computed them from parameters."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, ShardTensor):
                state[key] = plain(value)


@cache
def watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_other_optimizers)


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step of an optimizer of the model's own parameters, which have no gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := getattr(param, SHARDED_AS, None)) is not None:
                raise ConfigurationError(
                    f"{name}: an optimizer of model.parameters() trains nothing of a sharded "
                    "model; hand shard() a function that makes it, as optimizer=lambda params: "
                    "torch.optim.AdamW(params, lr=1e-3), and step sharded.optimizer"
                )


def _refuse_other_parts(state: Mapping[str, Any], held: list[tuple[str, int, int]]) -> None:
    """Refuse a state of other parts; runs before an optimizer's load_state_dict()."""
    found = [tuple(part) for part in state.get(_HELD, ())]
    if found != held:
        whose = "of another rank or other sizes" if found else "of a model that is not sharded"
        raise ConfigurationError(
            f"this state of the optimizer is {whose}: each rank has its own part; save "
            "sharded.state_dict() with torch.distributed.checkpoint, which loads into any sizes"
        )


def _refuse_new_group(_group: object) -> None:
    raise ConfigurationError(
        "add_param_group: the optimizer has the parameters that the model had when it was sharded; "
        "make all groups in the function that shard() gets"
    )
