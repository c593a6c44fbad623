# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs are cast to param_dtype as by FSDP2, whatever holds them, unless the caller says no."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from megatron_asynchzp import ShardSizes, shard
from scripts.testbed.ranks import run_ranks
from tests.support.loops import assert_refused, new_adamw

SIZES = ShardSizes(2, 2, 2)


@dataclasses.dataclass
class Batch:
    pixels: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "frozen"


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = 2 * self.x


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


Pair = namedtuple("Pair", "first second")


class Opaque:
    """Nothing that FSDP2 looks into."""

    def __init__(self, x: torch.Tensor):
        self.x = x


def x() -> torch.Tensor:
    return torch.linspace(-1, 997.3, 8).view(2, 4)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "a tensor": x,
    "fp64": lambda: x().double(),
    "integers": lambda: x().long(),
    "bool": lambda: x() > 0,
    "complex": lambda: torch.complex(x(), x()),
    "a list": lambda: [x(), x().int(), "text", None],
    "a tuple": lambda: (x(), (x(),)),
    "a set": lambda: {x()},
    "a dict": lambda: {"x": x(), 1: [x()]},
    "a named tuple": lambda: Pair(x(), x() > 0),
    "an ordered dict": lambda: OrderedDict(b=x(), a=x().int()),
    "a dict with a default": lambda: defaultdict(list, x=[x()]),
    "a dataclass": lambda: Batch(x(), x() > 0),
    "a frozen dataclass": lambda: Frozen(x()),
    "a dataclass in a list in a dict": lambda: {"all": [Frozen(Batch(x(), x()))]},
    "slots": lambda: Slotted(x()),
    "a model's output": lambda: BaseModelOutput(last_hidden_state=x(), attentions=(x(),)),
    "another object": lambda: Opaque(x()),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """In an order of their own; knows nothing of what is cast."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) or isinstance(value, (Opaque, Slotted)):
        names = value.__slots__ if isinstance(value, Slotted) else vars(value)
        value = [getattr(value, name) for name in names]
    if isinstance(value, (list, tuple, set)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


class Probe(nn.Module):
    """Notes what its layer and itself are called with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = Layer(), []

    def forward(self, value: Any, *, also: Any = None) -> Any:
        self.seen.append((value, also))
        return self.layer(value, also=also)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, value: Any, also: Any) -> torch.Tensor:
        self.seen.append((value, also))
        return self.linear(tensors_in((value, also))[0].to(self.linear.weight.dtype))


def described(model: Any) -> list[Any]:
    seen = [*model.seen, *model.layer.seen]
    return [
        [(type(value), [(one.dtype, one.tolist()) for one in tensors_in(value)]) for value in pair]
        for pair in seen
    ]


def classes(found: list[Any]) -> list[Any]:
    """FSDP2 makes a dict of any class of dicts; here each stays what it was."""
    return [
        [(dict if issubclass(kind, defaultdict) else kind, tensors) for kind, tensors in pair]
        for pair in found
    ]


def check_containers(casts: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=casts)
    mesh = init_device_mesh("cpu", (2,))
    theirs = Probe()
    for module in (theirs.layer, theirs):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    ours: Any = Probe()
    with shard(
        ours, [ours.layer], SIZES, new_adamw, param_dtype=torch.bfloat16, cast_forward_inputs=casts
    ):
        for name, new in CONTAINERS.items():
            for model in (ours, theirs):
                model.seen.clear()
                model.layer.seen.clear()
            found, expected = ours(new(), also=new()), theirs(new(), also=new())
            assert torch.equal(found, expected) and found.dtype == expected.dtype, name
            assert classes(described(ours)) == classes(described(theirs)), name
            if not casts:
                (value, _), *_ = ours.seen
                assert tensors_in(value)[0].dtype == tensors_in(new())[0].dtype, name


@pytest.mark.habit(
    "fp32 inputs in dataclasses, dicts, lists, named tuples or packed sequences with `param_dtype`",
    "fp32 inputs that need all their bits with `param_dtype`: rotary tables",
)
@pytest.mark.parametrize("casts", [True, False])
def test_modules_see_the_bits_that_they_see_under_fsdp2(casts):
    run_ranks(check_containers, 2, casts)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(4, 4)

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        return self.gru(packed)[0].data


class Writing(nn.Module):
    """Writes into containers of its caller, as modules that cache do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: list, cache: dict) -> torch.Tensor:
        y = self.layer(x)
        kept.append(y)
        cache["y"] = y
        return y


def check_more() -> None:
    plain = Recurrent().bfloat16()
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    model = Recurrent()
    with shard(model, [], SIZES, new_adamw, param_dtype=torch.bfloat16):
        assert torch.equal(model(packed), plain(packed.to(torch.bfloat16)))

    writing, kept, cache = Writing(), [], {"n": 1}
    with shard(writing, [], SIZES, new_adamw, param_dtype=torch.bfloat16):
        y = writing(torch.ones(2, 4), kept, cache)
        assert kept[0] is y is cache["y"]

    given, derived = Probe(), Derived(x())
    with shard(given, [given.layer], SIZES, new_adamw, param_dtype=torch.bfloat16):
        given(derived)
        assert given.seen[0][0].twice.dtype == given.seen[0][0].x.dtype == torch.bfloat16
        assert derived.twice.dtype == derived.x.dtype == torch.float32  # the caller's own
        leaf = x().requires_grad_()
        given(Frozen(leaf)).sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32

    assert_refused(
        lambda: shard(Probe(), [], SIZES, new_adamw, cast_forward_inputs="no"),
        r"^cast_forward_inputs is 'no'; it is to be True or False",
    )


def test_packed_sequences_are_cast_too_and_containers_of_the_caller_stay_theirs():
    run_ranks(check_more, 2)
