# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Directories with two small checkpoints each, saved once by Megatron itself."""

import shutil
from pathlib import Path

import pytest

from megatron_asynchzp.checkpoint_files.saving import complete_directory
from tests.support.checkpoint_damage import NEWER, OLDER
from tests.support.saved_state import read_state, save_two
from tests.support.world import on_ranks


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> Path:
    """`ours` has manifests, `stock` has none."""
    folder = tmp_path_factory.mktemp("originals")
    (folder / "stock").mkdir()
    on_ranks(save_two, 2, str(folder / "stock"))
    shutil.copytree(folder / "stock", folder / "ours")
    for name in (OLDER, NEWER):
        complete_directory(folder / "ours" / name)
    return folder


@pytest.fixture(scope="session")
def truth(originals) -> dict[str, dict[str, bytes]]:
    """What was saved, by directory."""
    states = {name: read_state(originals / "stock" / name) for name in (OLDER, NEWER)}
    assert states[OLDER].keys() == states[NEWER].keys() and len(states[NEWER]) == 7
    assert all(states[OLDER][name] != states[NEWER][name] for name in states[NEWER])
    return states


@pytest.fixture
def folder(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "ours", tmp_path / "run"))


@pytest.fixture
def stock_folder(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "stock", tmp_path / "stock"))
