# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What FP8 needs of a machine, refused in one line where it is not there."""

import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core import package_info
from packaging.version import Version
from torch import nn

from megatron_asynchzp.mcore.start.low_precision import faults_of_machine, send_codes


def asked(recipe: str | None, graphs: str = "none") -> Namespace:
    is_fp4 = recipe == "nvfp4"
    return Namespace(
        fp8=None if is_fp4 or not recipe else "hybrid",
        fp8_recipe=recipe,
        fp4="e2m1" if is_fp4 else None,
        fp4_recipe="nvfp4",
        cuda_graph_impl=graphs,
    )


def refusal(recipe: str | None = "tensorwise", graphs: str = "none") -> str:
    line, *_ = faults_of_machine(asked(recipe, graphs))
    what = f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else f"--cuda-graph-impl {graphs}"
    if recipe == "nvfp4":
        what = "--fp4-format e2m1 --fp4-recipe nvfp4"
    assert line.startswith(what) and "\n" not in line
    return line


@pytest.fixture
def installed(monkeypatch):
    """Pretends Transformer Engine of a version, on a GPU that computes some recipes."""

    def install(version: str, *can: str) -> None:
        def answer(name: str) -> Any:
            return lambda return_reason: (name in can, "" if name in can else f"no {name} here.")

        module = ModuleType("transformer_engine.pytorch")
        kinds = ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
        for name in (f"is_{kind}_available" for kind in kinds):
            setattr(module, name, answer(name))
        monkeypatch.setitem(sys.modules, "transformer_engine", package := ModuleType("te"))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
        package.pytorch = module  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version(version))

    return install


def test_nothing_is_asked_of_a_run_without_fp8(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert not [*faults_of_machine(asked(None))]


def test_a_missing_transformer_engine_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "pip install" in refusal()
    assert "pip install" in refusal(None, "transformer_engine")
    assert "pip install" in refusal(None, "local")


@pytest.mark.parametrize("version, is_known", [("2.14.1", False), ("2.15.0", True)])
def test_a_transformer_engine_that_is_too_old_is_named_with_its_version(
    installed, version, is_known
):
    installed(version, "is_fp8_available")
    if is_known:
        assert not [*faults_of_machine(asked("tensorwise"))]
        assert not [*faults_of_machine(asked(None, "transformer_engine"))]
    else:
        assert f"{version} is installed" in refusal()
        assert f"{version} is installed" in refusal(None, "transformer_engine")


@pytest.mark.parametrize("version, is_known", [("0.18.1", False), ("0.19.0", True)])
def test_an_old_megatron_is_named_where_it_is_to_capture_layers_by_itself(
    installed, monkeypatch, version, is_known
):
    installed("2.15.0")
    monkeypatch.setattr(package_info, "__version__", version)
    faults = [*faults_of_machine(asked(None, "local"))]
    line = "--cuda-graph-impl local needs megatron-core 0.19 or later, and 0.18.1 is installed; "
    assert [fault.startswith(line) for fault in faults] == [True] * (not is_known)
    assert not [*faults_of_machine(asked(None, "transformer_engine"))]


@pytest.mark.parametrize(
    "recipe, question",
    [
        ("tensorwise", "is_fp8_available"),
        ("delayed", "is_fp8_available"),
        ("blockwise", "is_fp8_block_scaling_available"),
        ("mxfp8", "is_mxfp8_available"),
        ("nvfp4", "is_nvfp4_available"),
    ],
)
def test_each_recipe_is_asked_of_the_gpu_by_its_own_question(installed, recipe, question):
    installed("2.18.0", question)
    assert not [*faults_of_machine(asked(recipe))]
    installed("2.18.0")
    assert f"no {question} here" in refusal(recipe)


class _Linear(nn.Linear):
    is_fsdp2, _fp8_workspaces = False, {}


class _Unit:
    def __init__(self, layer: nn.Module):
        self.params, self.sent, self.forms = list(layer.parameters()), list[str](), []
        self.param_names = [name for name, _ in layer.named_parameters()]

    def gather_in_codes(self, names: list[str], forms: Any, is_computing: Any) -> None:
        self.sent, self.forms = [name.removesuffix(".weight") for name in names], forms


@pytest.fixture
def layer_of(monkeypatch):
    """A layer of some linear parts, or with one called "linear"."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    class Layer(nn.Module, BaseTransformerLayer):
        def __init__(self, number: int, names: tuple[str, ...] = ("linear",)):
            super().__init__()
            self.layer_number = number
            for name in names:
                outer, _, last = name.rpartition(".")
                inner = self
                for part in outer.split(".") if outer else ():
                    if not hasattr(inner, part):
                        setattr(inner, part, nn.Module())
                    inner = getattr(inner, part)
                setattr(inner, last, _Linear(2, 2, bias=False))

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        module.fp8 = None  # pyright: ignore[reportAttributeAccessIssue]
    return Layer


def recipe_of(kind: str, **more: Any) -> SimpleNamespace:
    kinds = ("float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4")
    weight = SimpleNamespace(power_2_scale=False, amax_epsilon=0.0, fp4_2d_quantization=True)
    answers = {each: (lambda is_it=each == kind: is_it) for each in kinds}
    weights = {"fp8_quant_fwd_weight": weight, "fp4_quant_fwd_weight": weight}
    return SimpleNamespace(**answers | weights | more)


def config_of(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        fp8="e4m3", fp8_recipe="mxfp8", fp4=None, first_last_layers_bf16=True, num_layers=6,
        num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1, recompute_granularity=None,
        **more,
    )  # fmt: skip


def test_layers_that_stay_in_bf16_at_either_end_gather_no_codes(monkeypatch, layer_of):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda _: recipe_of("float8_current_scaling"))
    layers = nn.ModuleList(layer_of(number) for number in range(1, 7))  # Megatron counts from 1
    units: Any = [_Unit(layer) for layer in layers]
    send_codes(layers, config_of(), units)
    assert [unit.sent for unit in units] == [[], [], *[["linear"]] * 3, []]


PARTS = (
    "attention.linear_q_up_proj",
    "attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.shared_experts.linear_fc1",
)


@pytest.mark.parametrize(
    ("modules", "sent"),
    [
        (None, PARTS),
        (["core_attn", "layernorm", "moe_act", "gdn_norm_out"], PARTS),
        (["mla_up_proj"], PARTS[1:]),
        (["mlp"], PARTS[:2]),
        (["layernorm", "moe"], PARTS[:2]),
        (["shared_experts"], PARTS[:3]),
        (["a part of a later Megatron"], ()),
    ],
)
def test_parts_that_backward_calls_again_stay_in_bf16_where_it_reads_other_codes(
    monkeypatch, layer_of, modules, sent
):
    from megatron.core import fp8_utils

    config = config_of(recompute_modules=modules)
    config.recompute_granularity = modules and "selective"
    for kind, expected in (("mxfp8", sent), ("float8_current_scaling", PARTS)):
        recipe = recipe_of(kind)
        monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda _, recipe=recipe: recipe)
        layer = layer_of(3, PARTS)
        unit: Any = _Unit(layer)
        send_codes(layer, config, [unit])
        assert unit.sent == list(expected)
    layer.mlp.linear_fc1.num_gemms = 2  # grouped experts keep both from forward to backward
    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda _: recipe_of("mxfp8"))
    send_codes(layer, config, [unit])
    assert unit.sent == [name for name in sent if name != "mlp.linear_fc1"]


@pytest.mark.parametrize("kind", ["mxfp8", "float8_current_scaling"])
def test_a_weight_that_attention_absorbs_stays_in_bf16(monkeypatch, layer_of, kind):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda _: recipe_of(kind))
    layer = layer_of(3, ("attention.linear_kv_up_proj", "attention.linear_proj"))
    unit: Any = _Unit(layer)
    send_codes(layer, config_of(experimental_attention_variant="dsa"), [unit])
    assert unit.sent == ["attention.linear_proj"]


@pytest.mark.parametrize(
    ("kind", "more", "blocks"),
    [
        ("float8_current_scaling", {}, [(None, None)]),
        ("float8_block_scaling", {"w_block_scaling_dim": 2}, [(128, 128)]),
        ("float8_block_scaling", {"w_block_scaling_dim": 1}, []),
        ("mxfp8", {}, [(1, 32), (32, 1)]),
        ("mxfp8", {"enable_2d_quantization": True}, []),
        ("nvfp4", {}, [(16, 16)]),
        ("nvfp4", {"nvfp4_4over6": "weights"}, []),
        (
            "nvfp4",
            {"fp4_quant_fwd_weight": SimpleNamespace(fp4_2d_quantization=False)},
            [(1, 16), (16, 1)],
        ),
        ("custom", {}, []),
    ],
)  # fmt: skip
def test_blocks_of_a_recipe_that_was_not_compared_travel_in_bf16(
    monkeypatch, layer_of, kind, more, blocks
):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda _: recipe_of(kind, **more))
    unit: Any = _Unit(layer := layer_of(3))
    send_codes(layer, config_of(), [unit])
    assert [(form.rows, form.columns) for form in unit.forms] == blocks
