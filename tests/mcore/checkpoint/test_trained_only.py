# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters start on a base that was saved without them, and a checkpoint of theirs needs none of
the base's bytes."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.mapping import OTHER_KEYS
from scripts.testbed.adapters import adapted_and_seeded
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import TENSOR_PARALLEL, size_flags
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from scripts.testbed.tiny_gpt import seed_parameters
from tests.mcore.test_adapters import LLAMA
from tests.support.checkpoints import read_tensors, state_of
from tests.support.world import on_ranks

pytestmark = pytest.mark.slow

SAVED_AT, STEPS = 3, 6
TRAINED_ONLY = "--asynchzp-save-trained-only"
# What is not loaded is drawn from another seed.
OTHER_SEED = ["--seed", "4321"]
# Where a checkpoint has the norms of Megatron's own layers.
NORMS = {layer: key for key, layer in OTHER_KEYS.items()}


def run(*flags: str, prepare: Any = adapted_and_seeded) -> RunRecord:
    argv = gpt_args(*LLAMA, "--train-iters", str(STEPS), "--lr", "1e-2", *flags)
    return run_pretrain(argv, state_of, prepare)


def refusal(*flags: str, prepare: Any = adapted_and_seeded) -> str:
    try:
        run(*flags, prepare=prepare)
    except ConfigurationError as error:
        return str(error)
    return "nothing was refused"


def on_values_of(base: Path, chunks: list[Any]) -> list[Any]:
    """Adapters around weights that are copied from a checkpoint by hand: stock Megatron loads
    none that lacks a part of the model."""
    stored = read_tensors(base, 2)
    with torch.no_grad():
        for name, param in adapted_and_seeded(chunks)[0].named_parameters():
            found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name.replace(".to_wrap", ""))
            if not param.requires_grad:
                key = f"decoder.layers.{found[2]}" if found else name
                key = NORMS.get(key, key)
                param.copy_(stored[key][int(found[1])] if found else stored[key])
    return chunks


def saved_and_resumed(folder: Path) -> dict[str, Any]:
    base, part, whole = (str(folder / name) for name in ("base", "part", "whole"))
    sizes = size_flags((2, 2, 4))
    on_base = ["--pretrained-checkpoint", base]
    run("--save", base, "--train-iters", "2", "--save-interval", "2", prepare=seed_parameters)
    saving = ["--save-interval", str(SAVED_AT), "--save"]
    stock = run(prepare=partial(on_values_of, folder / "base"))
    ours = run(*on_base, *sizes, *saving, part, TRAINED_ONLY)
    run(*on_base, *sizes, *saving, whole)
    passing = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "2"]
    passing += ["--non-persistent-global-ckpt-dir", str(folder / "passing"), *on_base, *sizes]
    passing += [*saving, str(folder / "lasting"), "--load", str(folder / "lasting"), TRAINED_ONLY]
    run(*passing, "--train-iters", str(SAVED_AT + 1))
    beside = run(*passing, *OTHER_SEED, "--override-opt_param-scheduler")
    resuming = ["--ckpt-step", str(SAVED_AT), *OTHER_SEED, *on_base, "--load", part]
    resumed = {
        name: run(*resuming, *flags)
        for name, flags in {
            "same sizes": sizes,
            "other sizes": size_flags((1, 2, 4)),
            "tensor parallel": [*TENSOR_PARALLEL, *size_flags((2, 1, 2))],
        }.items()
    }
    again = zip(ours.inspected, resumed["same sizes"].inspected, strict=True)
    loading = ["--ckpt-step", str(SAVED_AT), "--load", part, *sizes]
    return {
        "stock": (stock.losses, stock.grad_norms),
        "ours": (ours.losses, ours.grad_norms),
        "log": ours.log,
        "resumed": {name: (one.losses, one.grad_norms) for name, one in resumed.items()},
        "beside passing ones": (beside.losses, beside.grad_norms),
        "is the same": all(torch.equal(*pair) for pair in again),
        "part": {name: one.numpy() for name, one in read_tensors(folder / "part").items()},
        "whole": {name: one.numpy() for name, one in read_tensors(folder / "whole").items()},
        "without a base": refusal(*loading),
        "itself as its base": refusal(*loading, "--pretrained-checkpoint", part),
        "into the base alone": refusal(*loading, *on_base, prepare=seed_parameters),
        "resumed without adapters": refusal("--load", base, *sizes),
        "all of it trained": refusal(TRAINED_ONLY, *sizes, prepare=seed_parameters),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    return on_ranks(saved_and_resumed, 4, tmp_path_factory.mktemp("runs"), timeout_s=600)[0]


def worst(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    return max(worst_difference(*pair) for pair in zip(ours, theirs, strict=True))


def test_adapters_start_on_a_base_that_was_saved_without_them_as_in_stock_megatron(found):
    assert worst(found["ours"], found["stock"]) < 1e-6
    assert "adapter.linear_in.weight and 7 more, which start anew" in found["log"]


def test_a_checkpoint_of_what_is_trained_has_the_adapters_of_the_whole_one_bit_for_bit(found):
    part, whole = found["part"], found["whole"]
    assert part and all(".adapter." in name for name in part)
    assert set(part) == {name for name in whole if ".adapter." in name}
    assert all((part[name] == whole[name]).all() for name in part)


def test_a_run_resumes_from_what_was_trained_and_a_base_into_any_sizes(found):
    expected = [numbers[SAVED_AT:] for numbers in found["ours"]]
    for numbers in found["resumed"].values():
        assert worst(numbers, expected) < 1e-6
    assert found["is the same"]


def test_the_base_is_the_given_one_beside_non_persistent_checkpoints_of_the_adapters(found):
    expected = [numbers[SAVED_AT + 1 :] for numbers in found["ours"]]
    assert worst(found["beside passing ones"], expected) < 1e-6


@pytest.mark.parametrize(
    "case, line",
    [
        ("without a base", "add --pretrained-checkpoint DIR"),
        ("itself as its base", "add --pretrained-checkpoint DIR"),
        ("into the base alone", "has no tensor embedding.word_embeddings.weight"),
        ("resumed without adapters", "linear_proj.adapter.linear_in.weight; adapters start on"),
        ("all of it trained", "freeze the base"),
    ],
)
def test_what_is_missing_is_said_by_name(found, case, line):
    assert line in found[case] and "\n" not in found[case]
