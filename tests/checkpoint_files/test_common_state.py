# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps beside its shards is read wherever a version of Megatron has put it."""

import pickle
from argparse import Namespace
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asynchzp.checkpoint_files.index import COMMON, COMMON_OBJECT, read_common_state
from megatron_asynchzp.hf.torch_dist import TensorToWrite, write_checkpoint


def as_018_writes(folder: Path, state: Any) -> None:
    folder.mkdir()
    torch.save(state, folder / COMMON)


def as_019_writes(folder: Path, state: Any) -> None:
    weight = TensorToWrite("weight", torch.Size([2]), torch.float32, (), lambda _: torch.ones(2))
    write_checkpoint(folder, [weight], {COMMON_OBJECT: state})


@pytest.mark.parametrize("write", [as_018_writes, as_019_writes])
def test_the_common_state_is_read_from_a_file_and_from_an_object(
    tmp_path, write: Callable[[Path, Any], None]
):
    state = {"args": {"num_layers": 2}, "iteration": 7, "rng": torch.arange(3)}
    write(tmp_path / "it", state)
    found = read_common_state(str(tmp_path / "it"))
    assert torch.equal(found.pop("rng"), state.pop("rng")) and found == state


def test_a_checkpoint_without_a_common_state_is_named(tmp_path):
    write_checkpoint(tmp_path / "it", [], {})
    with pytest.raises(FileNotFoundError, match="it keeps no arguments"):
        read_common_state(tmp_path / "it")


@pytest.mark.parametrize("write", [as_018_writes, as_019_writes])
def test_classes_that_are_not_known_are_not_unpickled(tmp_path, write):
    write(tmp_path / "it", {"args": Fraction(1, 2)})
    with pytest.raises(pickle.UnpicklingError, match="Fraction"):
        read_common_state(tmp_path / "it")


@pytest.mark.parametrize("write", [as_018_writes, as_019_writes])
def test_arguments_as_megatron_keeps_them_are_read_once_it_is_imported(tmp_path, write):
    import megatron.core  # noqa: F401

    write(tmp_path / "it", {"args": Namespace(num_layers=2, params_dtype=torch.bfloat16)})
    assert read_common_state(tmp_path / "it")["args"].params_dtype is torch.bfloat16
