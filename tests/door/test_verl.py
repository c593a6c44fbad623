# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""verl trains alike with stock DDP and with AsyncHZP as verl's module."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.door.environment import SIZES, assert_close, check_equal, folder_of, run, sizes_as_env
from tests.door.test_bridge import PACKAGES as BRIDGE
from tests.door.tiny_models import make_model

PACKAGES = [
    *("verl==0.9.1", "ray==2.60.0", "tensordict==0.15.3", "msgpack", "jsonschema", "attrs"),
    *("referencing", "rpds-py", "jsonschema-specifications", "pyvers", "cloudpickle"),
    *("codetiming", "orjson"),
]
OURS = {"VERL_USE_EXTERNAL_MODULES": "megatron_asynchzp.mcore.door.plugin"}


@pytest.mark.slow
def test_verls_model_and_optimizer_train_as_stock(tmp_path: Path):
    folder = folder_of(PACKAGES)
    stock = run(folder, "verl_run", tmp_path / "stock.json", env={})
    ours = run(folder, "verl_run", tmp_path / "ours.json", env=OURS | SIZES)
    check_equal(stock, ours)
    assert "AsyncHZP groups of rank 0" in ours["log"]
    assert ours["asleep"] == [True]


@pytest.mark.slow
def test_a_refusal_ends_verl_and_does_not_train_with_stock(tmp_path: Path):
    with pytest.raises(AssertionError, match="ASYNCHZP_PREFETCH_DEPTH=-1"):
        run(
            folder_of(PACKAGES),
            "verl_run",
            tmp_path / "ours.json",
            env=OURS | {"ASYNCHZP_PREFETCH_DEPTH": "-1"},
        )


Sizes = tuple[int, int, int]


def call(
    tmp_path: Path, system: str, *calls: Any, ranks: int = 2, sizes: Sizes = (2, 2, 2)
) -> list[Any]:
    """What `calls` of an actor of verl's engine return, one after another in the same processes."""
    env = OURS | sizes_as_env(sizes) if system == "ours" else {}
    folder = folder_of([*BRIDGE.split(), *PACKAGES])
    out = tmp_path / f"{system}.json"
    return run(folder, "verl_engine_run", out, json.dumps(calls), env=env, ranks=ranks)["results"]


@pytest.mark.slow
def test_an_actor_of_ppo_trains_sleeps_resumes_and_gives_its_weights_as_with_stock(tmp_path: Path):
    from safetensors.torch import load_file

    model = str(tmp_path / "model")  # Bridge would read safetensors beside it as well
    make_model(Path(model), "Qwen2")
    files = {system: str(tmp_path / f"{system}.safetensors") for system in ("stock", "ours")}
    saved = {system: str(tmp_path / f"{system} saved") for system in files}
    # Not clipped, so that norms in another order of sums change no weight. Stock's checkpoint has
    # the form that others can read, ours always has.
    new = ["new", model, {"clip": 100.0}]
    readable = ["new", model, {"clip": 100.0, "dist_ckpt_optim_fully_reshardable": True}]

    def resumed(actor: list, folder: str) -> list[list]:
        return [actor, ["load", folder], ["train", 2, 4]]

    def whole_run(actor: list, system: str) -> list[list]:
        run_of_four = [actor, ["train", 0, 2], ["save", saved[system]], ["train", 2, 4]]
        return [*run_of_four, ["state"], ["export", files[system]]]

    _, first, _, last, wrapper, is_whole = call(tmp_path, "stock", *whole_run(readable, "stock"))
    results = call(
        tmp_path,
        "ours",
        *whole_run(new, "ours"),
        *resumed(new, saved["ours"]),
        *resumed(new, saved["stock"]),
    )
    _, own_first, _, own_last, own_wrapper, is_own_whole, _, _, again, _, _, taken_over = results
    _, _, back = call(tmp_path, "stock", *resumed(readable, saved["ours"]))
    assert (wrapper, own_wrapper) == (
        ["DistributedDataParallel", False],
        ["DoorDataParallel", True],
    )
    assert_close(own_first + own_last, first + last)
    assert len({loss for loss, _ in first + last}) > 4
    assert again == own_last
    assert_close(taken_over, last)
    assert_close(back, last)
    expected, weights = (load_file(files[system]) for system in files)
    assert weights.keys() == expected.keys() and is_whole and is_own_whole
    assert all(value.equal(expected[name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "name", "options"),
    [
        pytest.param(2, (1, 1, 2), "Llama", {}, id="1,1,2"),
        pytest.param(4, (2, 2, 4), "Qwen2", {}, id="2,2,4"),
        pytest.param(4, (1, 2, 4), "Llama", {}, id="1,2,4"),
        pytest.param(4, (2, 2, 2), "Llama", {"tensor_model_parallel_size": 2}, id="tp"),
        pytest.param(4, (2, 2, 2), "Qwen2", {"pipeline_model_parallel_size": 2}, id="pp"),
        pytest.param(4, (2, 2, 4), "Qwen3Moe", {"expert_model_parallel_size": 2}, id="ep"),
    ],
)
def test_actors_of_other_sizes_and_layouts_train_as_with_stock(
    tmp_path: Path, ranks: int, sizes: Sizes, name: str, options: dict
):
    make_model(tmp_path, name)
    calls = [["new", str(tmp_path), options], ["train", 0, 3]]
    _, stock = call(tmp_path, "stock", *calls, ranks=ranks)
    _, ours = call(tmp_path, "ours", *calls, ranks=ranks, sizes=sizes)
    assert_close(ours, stock)
