# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What FP8 needs of a machine, refused in one line where it is not there."""

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.low_precision import refuse_missing_te


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
    with pytest.raises(ConfigurationError) as refused:
        refuse_missing_te(asked(recipe, graphs))
    line = str(refused.value)
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
    refuse_missing_te(asked(None))


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
        refuse_missing_te(asked("tensorwise"))
        refuse_missing_te(asked(None, "transformer_engine"))
    else:
        assert f"{version} is installed" in refusal()
        assert f"{version} is installed" in refusal(None, "transformer_engine")


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
    refuse_missing_te(asked(recipe))
    installed("2.18.0")
    assert f"no {question} here" in refusal(recipe)
