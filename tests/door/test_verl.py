# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""verl's functions for Megatron train alike with stock DDP and with AsyncHZP as verl's module."""

from pathlib import Path

import pytest

from tests.door.environment import SIZES, check_equal, folder_of, run

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
