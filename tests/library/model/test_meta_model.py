# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model on the meta device gets all its values, or what gets none is refused by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ConfigurationError, ShardSizes, shard
from megatron_asynchzp.library.meta_model import materialize
from scripts.testbed.ranks import run_ranks

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype, fill: Callable[["Table"], object]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(4, 2, dtype=dtype), persistent=False)
        self.fill = fill

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.fill(self)


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    materialize(module, [], torch.device("cpu"), lambda _: None)
    return module


def on_meta(dtype: torch.dtype, fill: Callable[[Table], object]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Table(dtype, fill))


def nothing(_: Table) -> None:
    pass


def half(module: Table) -> None:
    module.table[:2] = 1


def what_it_held(module: Table) -> None:
    module.table = module.table.roll(1, 0)


def zeros(module: Table) -> None:
    module.table.zero_()


def ones_anew(module: Table) -> None:
    module.table = torch.ones(4, 2, dtype=module.table.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.habit("a buffer of any dtype that nobody fills on the meta device")
def test_a_buffer_of_any_dtype_that_is_not_filled_is_refused_by_name(dtype: torch.dtype):
    for fill in (nothing, half, what_it_held):
        with pytest.raises(ConfigurationError, match=r"0.table: the reset_parameters\(\) of Table"):
            filled(on_meta(dtype, fill))
    for fill, value in ((zeros, 0), (ones_anew, 1)):
        module = filled(on_meta(dtype, fill))[0]
        assert torch.equal(module.table, torch.full((4, 2), value).to(dtype))
        torch.manual_seed(0)
        assert torch.equal(module.weight, torch.randn(3)), "random numbers are drawn once"


def test_values_that_are_not_numbers_are_values_too():
    module = filled(on_meta(torch.float32, lambda module: module.table.fill_(torch.nan)))
    assert module[0].table.isnan().all()


def test_random_values_of_integers_are_those_of_one_call():
    module = filled(on_meta(torch.int64, lambda module: module.table.random_(1000)))
    torch.manual_seed(0)
    torch.randn(3)
    assert torch.equal(module[0].table, torch.empty(4, 2, dtype=torch.int64).random_(1000))


def test_a_tensor_on_the_meta_device_that_is_no_buffer_is_refused_by_name():
    module = on_meta(torch.bool, zeros)
    module[0].kept = {"mask": torch.empty(3, device="meta")}
    with pytest.raises(ConfigurationError, match=r"0.kept\['mask'\] is on the meta device"):
        filled(module)


class Outer(nn.Module):
    """As models of transformers do: one method for all modules in it."""

    def __init__(self, knows_norms: bool):
        super().__init__()
        self.linear, self.norm, self.knows_norms = Norm(), Norm(), knows_norms

    def _init_weights(self, module: nn.Module) -> None:
        if self.knows_norms and isinstance(module, Norm):
            module.weight.data.fill_(1.0)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def test_a_model_may_fill_modules_that_do_not_fill_themselves():
    with torch.device("meta"):
        knowing, unknowing = Outer(True), Outer(False)
    assert torch.equal(filled(knowing).norm.weight, torch.ones(3))
    with pytest.raises(ConfigurationError, match=r"linear.weight: the _init_weights\(\) of Outer"):
        filled(unknowing)


class Nothing:
    """A callable object, which has no __name__."""

    def __call__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("fill", [Nothing(), partial(Nothing())], ids=["object", "partial"])
@pytest.mark.parametrize("name", ["reset_parameters", "_reset_parameters", "_init_weights"])
def test_a_method_that_is_no_function_is_named_where_it_leaves_a_tensor_unfilled(name: str, fill):
    with torch.device("meta"):
        model = nn.Sequential(Norm())
    is_of_model = name == "_init_weights"
    setattr(model if is_of_model else model[0], name, fill)
    owner = "Sequential" if is_of_model else "Norm"
    with pytest.raises(ConfigurationError, match=rf"0.weight: the {name}\(\) of {owner}"):
        filled(model)


# ---- values of one rank


class Holding(nn.Module):
    """A layer with frozen parameters and buffers of dtypes that fp32 does not hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].weight
        exact = torch.rand(5, dtype=torch.float64)
        self.frozen = nn.Parameter(exact, requires_grad=False)
        self.register_buffer("exact", exact / 3)
        self.register_buffer("small", torch.arange(3, dtype=torch.int16))
        self.register_buffer("large", torch.tensor(2**60 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.tensor([0, 255], dtype=torch.uint8))
        self.register_buffer("rotations", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def check_values(all_sizes: list[tuple[int, int, int]]) -> None:
    other = Holding()
    values = {name: value.clone() for name, value in other.state_dict().items()}
    for name in ("frozen", "exact", "rotations"):
        values[name] = values[name] * 1.1
    values["large"] += 1
    for name in ("mask", "bytes", "small"):
        values[name] = values[name].flip(0)
    for sizes in all_sizes:
        model = Holding()
        with shard(model, model.layers, ShardSizes(*sizes), torch.optim.AdamW) as sharded:
            source = dist.get_world_size() - 1
            is_source = dist.get_rank() == source
            sharded.load_full_params(values if is_source else None, source=source)
            found = dict(model.named_buffers())
            found |= {name: value.clone() for name, value in sharded.full_params()}
            for name, value in values.items():
                if name != "head.weight":
                    assert found[name].dtype == value.dtype, name
                    assert torch.equal(found[name], value), name
            alone = {name: value for name, value in values.items() if name != "layers.0.weight"}
            sharded.load_full_params(alone if is_source else None, source=source)
            for change, text in (
                (None, "the source rank has no values"),
                ({"exact": torch.zeros(2)}, "has shape"),
                ({"extra": torch.zeros(1)}, "extra is not a parameter or persistent buffer"),
                ({"passing": torch.zeros(2)}, "passing is a buffer with persistent=False"),
                ({"head.weight": torch.zeros(4, 4)}, "layers.0.weight and head.weight are one"),
                ({"frozen": None}, "frozen is a NoneType there"),
                ({"exact": torch.zeros(5, device="meta")}, "exact is on the meta device there"),
                ({"small": torch.full((3,), 1 << 20)}, "small is torch.int64 there, torch.int16"),
                ({"large": torch.tensor(0.5)}, "large is torch.float32 there, torch.int64"),
                ({"exact": torch.zeros(5, dtype=torch.complex64)}, "exact is torch.complex64"),
                ({"layer._extra_state": torch.zeros(1)}, "call set_extra_state"),
            ):
                with pytest.raises(ConfigurationError, match=text):
                    given = values | change if is_source and change is not None else None
                    sharded.load_full_params(given, source=source)
            lacking = {name: value for name, value in values.items() if name != "mask"}
            with pytest.raises(ConfigurationError, match="mask is not among the values"):
                sharded.load_full_params(lacking if is_source else None, source=source)


@pytest.mark.habit(
    "a whole state dict that one rank has",
    "whole values of fp64, integers, bool or complex from one rank",
    "whole values with foreign, missing or tied names",
)
def test_values_of_one_rank_come_with_every_bit_or_are_refused_by_name_on_all():
    run_ranks(check_values, 2, [(1, 1, 2), (2, 2, 2)])


# ---- transformers

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"


def check_recipe(folder: Path, names: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    from tests.hf.models import configs, random_model, tokens

    section = PAGE.read_text().split("## Large models with `shard`\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    for name in names:
        saved = folder / name
        if dist.get_rank() == 0:
            random_model(name).save_pretrained(saved)
        dist.barrier()
        scope = {"folder": str(saved), "device": torch.device("cpu"), "layers_of": _layers_of}
        exec(compile(code, "recipe", "exec"), scope)
        model, sharded = scope["model"], scope["sharded"]
        model.eval()
        plain = AutoModelForCausalLM.from_pretrained(saved).eval()
        expected = plain(tokens()).logits
        assert torch.allclose(model(tokens()).logits, expected, rtol=1e-5, atol=1e-6), name
        sharded.close()
    assert configs().keys() >= set(names)


def _layers_of(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


FAMILIES = ["llama", "llama-tied-scaled-rope", "qwen2", "qwen3", "gpt2"]


@pytest.mark.slow
@pytest.mark.habit("a large model of transformers on the meta device")
def test_the_recipe_for_large_models_of_transformers_gives_their_logits(tmp_path: Path):
    run_ranks(check_recipe, 2, tmp_path, FAMILIES)
