# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the trial of an optimizer: what it does and keeps, seen in a few steps of a copy of it on a
few small parameters. No step of the optimizer itself is taken for that.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isclose
from typing import Any, cast

import torch
from torch import nn

from megatron_asynchzp.comm.agreement import settings_of_group
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.early_update import is_elementwise

_NAMES = "Adam AdamW SGD NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"
_OF_TORCH = tuple(getattr(torch.optim, name) for name in _NAMES.split(" "))
_OF_MATRICES = ("muon", "shampoo", "soap")
_OF_TENSORS = ("adafactor", "lamb", "lars", "kron", "psgd", "galore")
_NUM_STEPS = 32  # warmups, slow weights and preconditioners do something else at first
# Some begin with matrices from 128 x 128 on. Cut within a row.
_SHAPE, _NUM_BIASES, _CUT = (136, 144), 5, 7000
_NUM_LARGE, _LARGE = 4, 1e4
_NUM_OF_BLOCKS = 5000  # from 4096 elements on bitsandbytes has states of 8 bits
_LEAST_RATE, _TOLERANCE = 1e-3, 1e-3
_REMEDY = (
    "take AdamW, SGD or another one that does, or say so on the class with is_elementwise = True "
    "where that is certain"
)


@dataclass(frozen=True)
class StateKind:
    """The kind of a parameter's state. per: 'element', 'parameter' (a tensor of one value),
    'value' (no tensor) or 'other'."""

    per: str
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


def refuse_by_trial(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigurationError for an optimizer that does not update each element of a parameter
    from that element's own gradient and states, or keeps states of another kind.

    A class that says `is_elementwise = True` is believed. Any other one that is not known steps on
    whole matrices and on two ranks' parts of them: values, states and settings have to agree.
    """
    kind = type(optimizer)
    if kind in _OF_TORCH:
        return
    if _is_named(kind, _OF_MATRICES + _OF_TENSORS) and not is_elementwise(optimizer):
        raise ConfigurationError(_refusal(kind))  # some begin with matrices later than any trial
    try:
        whole, parts = (None, []) if is_elementwise(optimizer) else _whole_and_parts(optimizer)
    except Exception as error:  # whatever a class of somebody else's raises
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{_refusal(kind)} (tried on a part of a matrix it ends in {type(error).__name__}: "
            f"{first_line})"
        ) from None
    for kinds in [*(whole.kinds() if whole else ()), *kinds_of_states(optimizer, _NUM_OF_BLOCKS)]:
        _refuse_other_states(optimizer, kinds)
    if whole is not None and (found := whole.difference(parts)) is not None:
        raise ConfigurationError(
            f"{_refusal(kind)} (tried on a matrix and on two parts of it, {found} differ)"
        )


def _refusal(kind: type) -> str:
    muon = "; Muon on whole matrices is Megatron's --optimizer muon"
    return (
        f"{kind.__name__} is not known to update each element from that element's gradient and "
        f"states alone, and each rank has a part of each parameter: {_REMEDY}"
        f"{muon if _is_named(kind, _OF_MATRICES) else ''}"
    )


def _is_named(kind: type, names: Sequence[str]) -> bool:
    return any(one in kind.__name__.lower() for one in names)


def _refuse_other_states(optimizer: object, kinds: dict[str, StateKind]) -> None:
    for key, kind in kinds.items():
        if kind.per == "other":
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps a state {key!r} of shape {kind.shape} that is "
                "not one value per element of a parameter, which no checkpoint can have for other "
                "sizes; take an optimizer that keeps one value per element"
            )


def has_all_at_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step is known to make all states that there are to be."""
    return type(optimizer) in _OF_TORCH


def kinds_of_states(optimizer: torch.optim.Optimizer, numel: int = 7) -> list[dict[str, StateKind]]:
    """Try what states a parameter has, by group and key; empty where the class cannot be tried."""
    sizes = [[torch.ones(numel, device=_device_of(group))] for group in optimizer.param_groups]
    try:
        tried = _Tried(optimizer, sizes)
        for _ in range(_NUM_STEPS):
            tried.step([[torch.ones_like(one) for one in group] for group in sizes])
        return list(tried.kinds())
    except Exception:  # whatever a class of somebody else's raises
        return [{} for _ in optimizer.param_groups]


def _device_of(group: dict[str, Any]) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


def _whole_and_parts(optimizer: torch.optim.Optimizer) -> "tuple[_Tried, list[_Tried]]":
    devices = [_device_of(group) for group in optimizer.param_groups]
    chance = torch.Generator().manual_seed(0)

    def spread(shape: tuple[int, ...]) -> torch.Tensor:
        """Nowhere nearly 0."""
        values = 0.5 + torch.rand(shape, generator=chance)
        return values * (torch.randint(0, 2, shape, generator=chance) * 2 - 1)

    def new_pair() -> tuple[torch.Tensor, torch.Tensor]:
        return spread(_SHAPE), spread((_NUM_BIASES,))

    def parts_of(matrix: torch.Tensor, bias: torch.Tensor) -> list[list[torch.Tensor]]:
        flat = matrix.reshape(-1)
        return [[matrix, bias], [flat[:_CUT], bias[:0]], [flat[_CUT:], bias]]

    def of_groups(pair: tuple[torch.Tensor, torch.Tensor], index: int) -> list[list[torch.Tensor]]:
        return [[one.to(device) for one in parts_of(*pair)[index]] for device in devices]

    start = tuple(one / 100 for one in new_pair())
    grads = [new_pair() for _ in range(_NUM_STEPS)]
    for matrix, bias in grads:  # larger on the second rank
        matrix.view(-1)[_CUT:] *= 7
        bias *= 3
    for matrix, bias in grads[-_NUM_LARGE:]:  # clipping of somebody else's has a threshold
        matrix *= _LARGE
        bias *= _LARGE
    # The first gradient is orthogonal to each row, where AdamP does something else.
    start[0][:, 1::2], grads[0][0][:, 1::2] = start[0][:, ::2], -grads[0][0][:, ::2]
    tried: list[_Tried] = []
    for index in range(3):
        one = _Tried(optimizer, of_groups(cast("Any", start), index))
        for pair in grads:
            one.step(of_groups(pair, index))
        tried.append(one)
    return tried[0], tried[1:]


class _Tried:
    """A copy of `optimizer`, of which only the first parameters of each group are there.

    values: of these, by group. What else knows the others finds them without elements.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, values: Sequence[Sequence[torch.Tensor]]):
        memo: dict[int, Any] = {}
        self.params: list[list[nn.Parameter]] = []
        for group, chosen in zip(optimizer.param_groups, values, strict=True):
            some = [nn.Parameter(one.clone()) for one in chosen]
            self.params.append(some)
            for number, one in enumerate(group["params"]):
                twin = some[number] if number < len(some) else nn.Parameter(chosen[0][:0].clone())
                memo[id(one)] = twin
                for value in optimizer.state.get(one, {}).values():
                    if not isinstance(value, torch.Tensor):
                        continue
                    is_asleep = not one.numel() and value.dim() == 1 and value.numel() > 1
                    if is_asleep or value.shape == one.shape:
                        memo[id(value)] = _resized(value, twin)
        attributes = vars(optimizer)
        hooks = [name for name in attributes if name.startswith("_optimizer_")]
        replaced = {*hooks, "step", "zero_grad", "add_param_group", "__reduce_ex__", "train"}
        replaced |= {"eval", "register_step_pre_hook", "state", "param_groups"}
        self.optimizer: Any = object.__new__(type(optimizer))
        vars(self.optimizer).update(
            deepcopy({key: attributes[key] for key in attributes if key not in replaced}, memo)
        )
        vars(self.optimizer).update({name: OrderedDict() for name in hooks})
        if "state" in attributes:
            self.optimizer.state = defaultdict(dict, deepcopy(dict(optimizer.state), memo))
        if "param_groups" in attributes:
            self.optimizer.param_groups = [
                {**deepcopy(settings_of_group(group), memo), "params": params}
                for group, params in zip(optimizer.param_groups, self.params, strict=True)
            ]
        for group in self.optimizer.param_groups:
            if "lr" in group and float(group["lr"]) < _LEAST_RATE:  # of a warmup, or too small
                is_tensor = isinstance(group["lr"], torch.Tensor)
                rate = torch.full_like(group["lr"], _LEAST_RATE) if is_tensor else _LEAST_RATE
                group["lr"] = rate
        if callable(start := getattr(self.optimizer, "train", None)):
            start()  # as Schedule-Free asks for

    @torch.no_grad()
    def step(self, grads: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take a step, without the hooks of anybody."""
        for params, some in zip(self.params, grads, strict=True):
            for param, grad in zip(params, some, strict=True):
                param.grad = grad.clone()
        step: Any = type(self.optimizer).step
        device = self.params[0][0].device if self.params and self.params[0] else None
        devices = [] if device is None or device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.optimizer)

    def kinds(self) -> Iterator[dict[str, StateKind]]:
        """Yield, by group, the kinds of all states that its parameters keep."""
        for params in self.params:
            kinds: dict[str, StateKind] = {}
            for param in params:
                for key, value in self.optimizer.state.get(param, {}).items():
                    kinds[key] = StateKind.of(value, param)
            yield kinds

    def difference(self, parts: "Sequence[_Tried]") -> str | None:
        """Name what the parts' optimizers have made otherwise than this one of whole matrices."""
        for index, (group, params) in enumerate(
            zip(self.optimizer.param_groups, self.params, strict=True)
        ):
            for number, param in enumerate(params):
                pieces = [part.params[index][number] for part in parts]
                if not _are_close(param, torch.cat([piece.view(-1) for piece in pieces])):
                    return "the values"
                own = self.optimizer.state.get(param, {})
                for key, value in own.items():
                    states = [
                        (piece, part.optimizer.state.get(piece, {}).get(key))
                        for piece, part in zip(pieces, parts, strict=True)
                        if piece.numel()
                    ]
                    if not _are_states_close(param, value, states):
                        return f"the states {key!r}"
            for key, value in settings_of_group(group).items():
                for part in parts:
                    if not _is_number_close(value, part.optimizer.param_groups[index].get(key)):
                        return f"the settings {key!r}"
        return None


def _resized(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A state of another size, as it is before the first step: of one value."""
    first = value.reshape(-1)[:1]
    filled = first.expand(like.numel()) if len(first) else value.new_zeros(like.numel())
    return filled.clone().view(like.shape)


def _are_close(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare by element, but for rounding: the arithmetic of vectors is that of scalars."""
    one, two = value.detach().reshape(-1).double(), other.detach().reshape(-1).double()
    return bool(torch.allclose(one, two, rtol=_TOLERANCE, atol=1e-7))


def _are_states_close(
    param: torch.Tensor, value: Any, states: Sequence[tuple[torch.Tensor, Any]]
) -> bool:
    if isinstance(value, torch.Tensor) and value.shape == param.shape:
        if any(not isinstance(one, torch.Tensor) or one.shape != of.shape for of, one in states):
            return False
        return _are_close(value, torch.cat([one.view(-1) for _, one in states]))
    return all(_is_number_close(value, one) for _, one in states)


def _is_number_close(value: Any, other: Any) -> bool:
    """Whether two numbers or 0-dim tensors are close. Anything else is taken as it is."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and _are_close(value, other)
    if isinstance(value, (int, float)) and isinstance(other, (int, float)):
        return isclose(value, other, rel_tol=_TOLERANCE)
    return True
