# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is relied on in Transformer Engine, which runs on CUDA devices alone, by the sources of each
minor version that was read."""

from pathlib import Path

import pytest

from tests.support.sources import parameters_of_method, sources

VERSIONS = ["2.15", "2.16", "2.17", "2.18", "2.19", "2.20"]
# What Megatron's `--transformer-impl transformer_engine` builds a model's linear layers from.
LAYERS = ["linear", "layernorm_linear", "grouped_linear"]
# `is_fused` of tests/support/te_stand_ins.py stands for these; the engine sets the last two.
OF_WEIGHTS = {"main_grad", "grad_added_to_main_grad", "overwrite_main_grad"}


def pytorch_of(folder: Path, version: str) -> Path:
    return sources(folder, "transformer_engine", version) / "pytorch"


@pytest.fixture(scope="module", params=VERSIONS)
def pytorch(request, tmp_path_factory) -> Path:
    return pytorch_of(tmp_path_factory.mktemp("te"), request.param)


def keeps_weights(file: Path) -> bool:
    """Whether a layer keeps weak references to its weights, by which backward finds main_grad."""
    return "weakref.ref(" in file.read_text() and has_names(file)


def has_names(file: Path) -> bool:
    text = file.read_text()
    return all(name in text for name in OF_WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_find_the_place_of_a_gradient_by_the_weight_itself(pytorch, layer):
    assert keeps_weights(pytorch / "module" / f"{layer}.py")


@pytest.mark.slow
def test_layers_before_2_15_do_not(tmp_path):
    module = pytorch_of(tmp_path, "2.14") / "module"
    assert not all(keeps_weights(module / f"{layer}.py") for layer in LAYERS)


@pytest.mark.slow
def test_adam_takes_the_dtypes_of_its_moments_and_makes_states_one_by_one(pytorch):
    file = pytorch / "optimizers" / "fused_adam.py"
    wanted = {"lr", "betas", "eps", "weight_decay", "adam_w_mode"}
    wanted |= {"exp_avg_dtype", "exp_avg_sq_dtype"}
    assert wanted <= set(parameters_of_method(file, "FusedAdam", "__init__"))
    assert parameters_of_method(file, "FusedAdam", "initialize_state")[0] == "param"


@pytest.mark.slow
def test_attention_takes_what_pasa_gives_it(pytorch):
    files = pytorch.rglob("dot_product_attention.py")
    (file,) = [one for one in files if "class DotProductAttention" in one.read_text()]
    found = parameters_of_method(file, "DotProductAttention", "__init__")
    assert found[:2] == ["num_attention_heads", "kv_channels"]
    wanted = {"num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type"}
    assert wanted | {"softmax_scale"} <= set(found)
    call = parameters_of_method(file, "DotProductAttention", "forward")
    assert call[:3] == ["query_layer", "key_layer", "value_layer"]
