# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model computes the same logits in stock Megatron and in transformers, whichever way it went."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from tests.hf.models import NAMES, load_model, logits_of, random_model
from tests.hf.trained import TRAINED, train_and_load
from tests.support.ranks import run_ranks

# fp32 sums in another order; logits are of size 1 to 10. A wrong row of a matrix shows at 1e-2.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def megatron_logits(folder) -> dict[str, torch.Tensor]:
    """Logits of Megatron, by the name of a trained model or of an imported one."""
    for name in NAMES:
        random_model(name).save_pretrained(folder / "hf" / name)
        import_model(folder / "hf" / name, folder / "imported" / name)
    ranks = run_ranks(
        train_and_load, 2,
        {name: folder / "trained" / name for name in TRAINED},
        {name: folder / "imported" / name for name in NAMES},
        env={"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip

    def told(name: str) -> Any:
        return next(rank[name] for rank in reversed(ranks) if rank[name] is not None)

    return {name: torch.from_numpy(told(name)) for name in (*TRAINED, *NAMES)}


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_that_megatron_trained_and_saved_has_the_same_logits_in_transformers(
    name, folder, megatron_logits, record_property
):
    shape = export_model(folder / "trained" / name, folder / "exported" / name)
    assert name.startswith(shape.family)
    logits = logits_of(load_model(folder / "exported" / name))
    assert_same_logits(logits, megatron_logits[name], record_property)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_transformers_has_the_same_logits_in_megatron_with_the_flags_it_was_told(
    name, megatron_logits, record_property
):
    assert_same_logits(logits_of(random_model(name)), megatron_logits[name], record_property)


def assert_same_logits(left: torch.Tensor, right: torch.Tensor, record_property):
    assert left.shape == right.shape
    difference = (left - right).abs().max().item()
    record_property("largest_difference", difference)
    print(f"largest difference {difference:.1e} of logits up to {right.abs().max().item():.1f}")
    assert right.std() > 0.1  # not a model that says nothing
    assert difference < TOLERANCE
