# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A parameter that cannot be sharded ends in one line with its name, its module and the remedy,
before anything communicates. That the others train is in tests/library/step/test_sharded_model.py.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from megatron_asynchzp import ShardSizes, shard
from megatron_asynchzp.engine.zero.params import check_kept_views, refuse_views
from megatron_asynchzp.engine.zero.tensors_within import memory_of
from megatron_asynchzp.errors import ConfigurationError


class Holder(nn.Module):
    """Between two ordinary layers, a module with one parameter `odd`."""

    def __init__(self, odd: torch.Tensor, is_trained: bool = True):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Module()
        is_param = isinstance(odd, nn.Parameter)
        self.inner.odd = odd if is_param else nn.Parameter(odd, requires_grad=is_trained)


class Wrapper(torch.Tensor):
    """Stands for DTensor, Transformer Engine's and torchao's tensors: its elements are another
    tensor's."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [one.inner if isinstance(one, Wrapper) else one for one in args]
        return return_and_correct_aliasing(func, args, kwargs, cls(func(*inner, **kwargs or {})))


class Elsewhere(nn.Parameter):
    """As if it were on another device."""

    device = property(lambda _: torch.device("cuda", 1))


# fmt: off
ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (lambda: Holder(torch.ones(3, dtype=torch.complex64)), "torch.view_as_complex"),
    "complex, frozen": (
        lambda: Holder(torch.ones(3, dtype=torch.complex64), False), "torch.view_as_real"),
    "fp64": (lambda: Holder(torch.ones(3, dtype=torch.float64)), r"convert it with float\(\)"),
    "whole numbers": (lambda: Holder(torch.arange(3), False), "make it a buffer"),
    "bool": (lambda: Holder(torch.ones(3, dtype=torch.bool), False), "make it a buffer"),
    "float8": (lambda: Holder(torch.ones(3).to(torch.float8_e4m3fn)), "convert it to bfloat16"),
    "meta": (lambda: Holder(torch.ones(3, device="meta")), "is on meta; move the whole model to"),
    "sparse": (lambda: Holder(torch.eye(3).to_sparse()), r"to_dense\(\)"),
    "a wrapper": (lambda: Holder(Wrapper(torch.ones(3))), "it is a Wrapper.*plain tensor"),
    "without a shape": (lambda: Holder(nn.UninitializedParameter()), "run one forward"),
    "on another device": (
        lambda: Holder(Elsewhere(torch.ones(3))), "is on cuda:1; move the whole model to one"),
    "expanded": (lambda: Holder(torch.ones(3, 1).expand(3, 4)), r"make the parameter a clone\(\)"),
}
# fmt: on


def refusal_of(model: nn.Module) -> str:
    """No process group is there: what is not refused before would fail for that."""
    with pytest.raises(ConfigurationError) as refusal:
        shard(model, [], ShardSizes(1, 1, 1), torch.optim.SGD)
    text = str(refusal.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("kind", ODD)
def test_a_parameter_that_cannot_be_sharded_is_refused_by_name_with_the_remedy(kind):
    build, words = ODD[kind]
    with pytest.raises(ConfigurationError, match=rf"inner.odd \(in a Module\).*{words}"):
        raise ConfigurationError(refusal_of(build()))


def test_a_lazy_module_is_refused_by_name():
    assert refusal_of(nn.Sequential(nn.LazyLinear(4))).startswith("0.weight (in a LazyLinear): ")


def test_a_model_without_parameters_is_refused():
    assert refusal_of(nn.Sequential(nn.ReLU())) == (
        "a Sequential without parameters: nothing to shard"
    )


def pair_of(parts: Sequence[torch.Tensor], is_trained=(True, True)) -> nn.Module:
    pair = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for layer, part, trained in zip(pair, parts, is_trained, strict=True):
        layer.weight = nn.Parameter(part, requires_grad=trained)
    return pair


def overlapping() -> list[tuple[torch.Tensor, torch.Tensor]]:
    memory = torch.ones(5, 4)
    return [(memory[:4], memory[1:]), (memory[:, :2], memory[:, :2])]


@pytest.mark.parametrize("is_trained", [(True, True), (True, False), (False, True)])
def test_two_parameters_that_share_memory_are_refused_by_name(is_trained):
    """Torch trains what they share as one; copies would be trained apart, silently."""
    tied_by_data = pair_of((torch.ones(4, 4), torch.ones(4, 4)), is_trained)
    tied_by_data[0].weight.data = tied_by_data[1].weight.data
    for pair in (tied_by_data, *(pair_of(parts, is_trained) for parts in overlapping())):
        text = refusal_of(pair)
        assert "0.weight (in a Linear) and 1.weight (in a Linear) share memory" in text
        assert "tie them as one parameter" in text


def test_parameters_beside_each_other_in_one_memory_are_no_mistake():
    """As cuDNN's recurrent layers lie, and the parameters in other frameworks' flat buffers."""
    memory = torch.ones(6, 4)
    rows, columns = (memory[3:], memory[:3]), (memory[:, :2], memory[:, 2:])
    frozen = pair_of(overlapping()[0], (False, False))
    for model in (pair_of(rows), pair_of(columns), frozen):
        assert "init_process_group" in refusal_of(model)


class Keeping(nn.Module):
    """A linear layer that keeps a part of its weight, or a copy of it, in a buffer or attribute."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(4, 4)
        keep(self, self.layer.weight.data[1:3])


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda model, part: model.register_buffer("kept", part), "kept"),
        (lambda model, part: setattr(model.first, "kept", part), "first.kept"),
        (lambda model, part: setattr(model, "kept", [part]), "kept"),
        (lambda model, part: model.register_buffer("kept", part.clone()), None),
    ],
)
def test_a_kept_view_of_a_parameter_is_refused_with_both_names(keep, path):
    model = Keeping(keep)
    if path is None:
        refuse_views(model)
        return
    with pytest.raises(ConfigurationError, match=r"layer\.weight \(in a Linear\)") as refused:
        refuse_views(model)
    assert str(refused.value).startswith(path)


def test_a_view_that_a_user_of_a_unit_keeps_after_forward_is_refused_with_its_name():
    """The model and the users are asked, with what is below these; other modules are not."""
    memory = torch.zeros(8)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    storage = memory_of(memory)[0]  # pyright: ignore[reportOptionalSubscript]
    model[1].kept = memory[2:4]
    model[0][0].copied = memory[:4].clone()  # pyright: ignore
    check_kept_views("layer 0", storage, model, [model[0]])
    with pytest.raises(ConfigurationError, match="^1.kept keeps a view of parameters of layer 1"):
        check_kept_views("layer 1", storage, model, [model[1]])
    model[0][0].kept = [memory.view(2, 4)[1]]  # pyright: ignore
    with pytest.raises(ConfigurationError, match=r"^0\.0\.kept\[0\] keeps a view of .* layer 0 "):
        check_kept_views("layer 0", storage, model, [model[0]])
