# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge trains, resumes, imports and exports alike with stock DDP and AsyncHZP."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.door.environment import (
    assert_close,
    check_built_in_shards,
    check_equal,
    folder_of,
    run,
    sizes_as_env,
)
from tests.door.tiny_models import make_model

PACKAGES = (
    "megatron-bridge==0.6.2 nvidia-modelopt==0.47.0 nvidia-resiliency-ext==0.7.0 "
    "megatron-energon==7.4.1 multi-storage-client==1.3.1 antlr4-python3-runtime==4.9.3 "
    "accelerate aiohttp attrs bitarray bitstring braceexpand bracex cffi click cpsat-logutils "
    "datasets decorator defusedxml deprecation diffusers dill filetype hydra-core ipython jmespath "
    "jsonschema jsonschema-specifications lark mfusepy mpmath multidict multiprocess omegaconf "
    "opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions orloge pandas peft "
    "prettytable prometheus-client psutil pulp pyarrow pycparser pyjwt pyroute2 python-dateutil "
    "pyyaml rapidyaml referencing regex rpds-py s3fs scipy six tensorboard timm tqdm traitlets "
    "tzdata wandb==0.29.0 wcmatch webdataset xattr xxhash yarl "
    "--python-platform x86_64-manylinux_2_39"  # nvidia-resiliency-ext asks for its glibc
)
MODELS = {"gpt": None, "llama": "Llama", "qwen": "Qwen3Moe"}
SAVED_AT = 4
Sizes = tuple[int, int, int]


def call(tmp_path: Path, *calls: Any, ranks: int = 2, sizes: Sizes = (2, 2, 2)) -> list[dict]:
    """What `calls` of functions of bridge_run return, one after another in the same processes."""
    packages, out = folder_of(PACKAGES.split()), tmp_path / "results.json"
    env = sizes_as_env(sizes)
    return run(packages, "bridge_run", out, json.dumps(calls), env=env, ranks=ranks)["results"]


def model_of(tmp_path: Path, recipe: str) -> str | None:
    """The folder of the tiny model of a recipe."""
    if (name := MODELS[recipe]) is None:
        return None
    if not (folder := tmp_path / name).exists():
        make_model(folder, name)
    return str(folder)


def training(tmp_path: Path, recipe: str, system: str, **more: Any) -> tuple[str, dict]:
    source = model_of(tmp_path, recipe)
    return "train", {"recipe": recipe, "system": system, "source": source, **more}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MODELS)
def test_pretrain_trains_and_resumes_as_stock_also_from_and_to_stock(tmp_path: Path, recipe: str):
    folders = {system: str(tmp_path / system) for system in ("stock", "ours")}
    new = (training(tmp_path, recipe, s, checkpoint={"save": folders[s]}) for s in folders)
    stock, ours = call(tmp_path, *new)
    check_equal(stock, ours)
    pairs = [("stock", "ours"), ("ours", "ours"), ("ours", "stock")]
    later = [
        training(tmp_path, recipe, s, checkpoint={"load": folders[saver], "ckpt_step": SAVED_AT})
        for s, saver in pairs
    ]
    back, resumed, taken_over = call(tmp_path, *later)
    assert resumed["steps"] == ours["steps"][SAVED_AT:]
    assert_close(back["steps"], stock["steps"][SAVED_AT:])
    assert_close(taken_over["steps"], stock["steps"][SAVED_AT:])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama", "qwen"])
def test_weights_of_hugging_face_are_imported_and_exported_as_with_stock(
    tmp_path: Path, recipe: str
):
    from safetensors.torch import load_file

    source = model_of(tmp_path, recipe)
    imported = str(tmp_path / "imported")
    folders = {system: str(tmp_path / system) for system in ("stock", "ours")}
    running = {str(step): str(tmp_path / f"running {step}") for step in (SAVED_AT, 6)}
    saves: dict[str, dict[str, Any]] = {
        s: {"pretrained_checkpoint": imported, "save": folders[s]} for s in folders
    }
    saves["ours"]["also_save_hf_checkpoint"] = True
    _, stock, ours, *others = call(
        tmp_path,
        ("import_weights", {"source": source, "checkpoint": imported}),
        training(tmp_path, recipe, "stock", checkpoint=saves["stock"]),
        training(tmp_path, recipe, "ours", checkpoint=saves["ours"], exports=running),
        training(tmp_path, recipe, "ours", is_initialized_from_source=True),
        training(tmp_path, recipe, "ours", checkpoint={"pretrained_checkpoint": source}),
    )
    check_equal(stock, ours)
    assert [run["steps"] for run in others] == [ours["steps"]] * 2
    exported = {
        (system, step): tmp_path / f"{system} {step}"
        for system in folders
        for step in (SAVED_AT, 6)
    }
    exports = [
        {"source": source, "checkpoint": f"{folders[s]}/iter_{step:07}", "folder": str(folder)}
        for (s, step), folder in exported.items()
    ]
    call(tmp_path, *(("export_weights", export) for export in exports), ranks=1)
    first = load_file(f"{source}/model.safetensors")
    for step in (SAVED_AT, 6):
        expected = load_file(exported["stock", step] / "model.safetensors")
        assert expected.keys() == first.keys()
        assert not any(value.equal(first[name]) for name, value in expected.items())
        beside = Path(folders["ours"]) / f"iter_{step:07}" / "hf"
        for folder in (exported["ours", step], Path(running[str(step)]), beside):
            weights = load_file(folder / "model.safetensors")
            assert weights.keys() == expected.keys()
            assert all(value.equal(expected[name]) for name, value in weights.items()), folder


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shards_and_two_units_while_a_model_is_built(tmp_path: Path):
    deep = {"num_layers": 12, "hidden_size": 64, "ffn_hidden_size": 128}
    [ours] = call(tmp_path, training(tmp_path, "gpt", "ours", model=deep))
    check_built_in_shards(ours)


TENSOR: dict[str, Any] = {"model": {"tensor_model_parallel_size": 2}}
PIPELINE: dict[str, Any] = {"model": {"pipeline_model_parallel_size": 2}}
CONTEXT: dict[str, Any] = {"model": {"context_parallel_size": 2}, "has_pasa": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "runs"),
    [
        pytest.param(2, (1, 1, 2), [("gpt", {}), ("llama", {"is_fp32": True})], id="1,1,2"),
        pytest.param(4, (2, 2, 2), [("llama", TENSOR), ("qwen", PIPELINE)], id="2,2,2"),
        pytest.param(4, (2, 2, 4), [("gpt", {}), ("llama", CONTEXT)], id="2,2,4"),
        pytest.param(4, (1, 2, 4), [("gpt", {})], id="1,2,4"),
    ],
)
def test_layouts_dtypes_and_sizes_train_as_stock(
    tmp_path: Path, ranks: int, sizes: Sizes, runs: list[tuple[str, dict]]
):
    systems = ("stock", "ours")
    calls = [training(tmp_path, recipe, s, **more) for s in systems for recipe, more in runs]
    results = call(tmp_path, *calls, ranks=ranks, sizes=sizes)
    for stock, ours in zip(results[: len(runs)], results[len(runs) :], strict=True):
        check_equal(stock, ours)
