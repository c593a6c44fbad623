# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model computes the same logits in stock Megatron and in transformers, whichever way it went."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from scripts.testbed.ranks import run_ranks
from tests.hf.models import NAMES, load_model, logits_of, random_model
from tests.hf.trained import TRAINED, train_and_load
from tests.support.selection import slow_unless

# fp32 sums in another order, of logits up to 3.3. Two swapped rows show at 3e-3 at least.
TOLERANCE = 1e-5

_FAST = (
    "llama, grouped queries, untied, TP 2",
    "gpt2, tied, TP 2",
    "mixtral, grouped queries, untied, EP 2",
    "llama",
    "gpt2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def megatron_logits(folder, request) -> dict[str, torch.Tensor]:
    """Logits of Megatron, by the name of a trained model or of an imported one, for the tests that
    will run."""
    items = [item for item in request.session.items if item.module is request.module]
    names = [
        item.callspec.params["name"] for item in items if "megatron_logits" in item.fixturenames
    ]
    imported = [name for name in names if name in NAMES]
    for name in imported:
        random_model(name).save_pretrained(folder / "hf" / name)
        import_model(folder / "hf" / name, folder / "imported" / name)
    ranks = run_ranks(
        train_and_load,
        2,
        {name: folder / "trained" / name for name in names if name in TRAINED},
        {name: folder / "imported" / name for name in imported},
    )

    def output(name: str) -> Any:
        return next(rank[name] for rank in reversed(ranks) if rank[name] is not None)

    return {name: torch.from_numpy(output(name)) for name in names}


@pytest.mark.parametrize("name", [slow_unless(name in _FAST, name) for name in TRAINED])
def test_a_model_that_megatron_trained_and_saved_has_the_same_logits_in_transformers(
    name, folder, megatron_logits, record_property
):
    shape = export_model(folder / "trained" / name, folder / "exported" / name)
    assert name.startswith(shape.family)
    logits = logits_of(load_model(folder / "exported" / name))
    assert_same_logits(logits, megatron_logits[name], record_property)


@pytest.mark.parametrize("name", [slow_unless(name in _FAST, name) for name in NAMES])
def test_a_model_of_transformers_has_the_same_logits_in_megatron_with_the_flags_printed(
    name, megatron_logits, record_property
):
    assert_same_logits(logits_of(random_model(name)), megatron_logits[name], record_property)


def assert_same_logits(left: torch.Tensor, right: torch.Tensor, record_property):
    assert left.shape == right.shape
    difference = (left - right).abs().max().item()
    record_property("largest_difference", difference)
    print(f"largest difference {difference:.1e} of logits up to {right.abs().max().item():.1f}")
    assert right.std() > 0.1  # not a model without an opinion
    assert difference < TOLERANCE
