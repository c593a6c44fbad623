# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the files, the newest intact checkpoint is chosen, and what torch then loads
is what was saved; or the run is refused in one line."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from megatron_asynchzp.checkpoint_files.choice import (
    choose_checkpoint,
    list_unfinished,
    repair_tracker,
)
from megatron_asynchzp.checkpoint_files.errors import CheckpointError
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST, write_manifest
from tests.support.checkpoint_damage import (
    CONFIG,
    DATA,
    HARMFUL,
    HARMLESS,
    METADATA,
    NEWER,
    OLDER,
    PERMISSIONS,
    TRACKER,
    flip,
)
from tests.support.saved_state import read_state, save_two
from tests.support.world import on_ranks

# What no one can know of a checkpoint without our manifest: that its files belong together.
_NEEDS_MANIFEST = ("older", "exchanged", "forged", "copy")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """`ours` has manifests, `stock` has none; `truth` maps a directory's name to its state."""
    folder = tmp_path_factory.mktemp("originals")
    (folder / "stock").mkdir()
    on_ranks(save_two, 2, str(folder / "stock"))
    shutil.copytree(folder / "stock", folder / "ours")
    for name in (OLDER, NEWER):
        write_manifest(folder / "ours" / name)
    return folder


@pytest.fixture(scope="module")
def truth(originals) -> dict[str, dict[str, bytes]]:
    states = {name: read_state(originals / "stock" / name) for name in (OLDER, NEWER)}
    assert states[OLDER].keys() == states[NEWER].keys() and len(states[NEWER]) == 7
    assert all(states[OLDER][name] != states[NEWER][name] for name in states[NEWER])
    return states


@pytest.fixture
def folder(originals, tmp_path) -> Path:
    shutil.copytree(originals / "ours", tmp_path / "run")
    return tmp_path / "run"


def chosen(folder: Path, truth: dict) -> str:
    """The choice, after what torch loads from it has been compared with what was saved."""
    choice = choose_checkpoint(folder)
    assert read_state(choice.folder) == truth[choice.folder.name]
    assert all("\n" not in line for line in choice.told)
    return choice.folder.name


def test_the_kinds_of_damage_are_many():
    assert len(HARMFUL) + len(HARMLESS) + len(PERMISSIONS) >= 120


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, truth, kind):
    HARMFUL[kind](folder)
    assert chosen(folder, truth) == OLDER
    assert repair_tracker(folder, choose_checkpoint(folder)) is not None
    assert (folder / TRACKER).read_text() == "2"
    assert not Path("damaged").exists()


@pytest.mark.parametrize("kind", HARMFUL)
def test_damage_to_the_only_checkpoint_is_one_line_with_the_reason(folder, kind):
    HARMFUL[kind](folder)
    shutil.rmtree(folder / OLDER)
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint(folder)
    told = str(refused.value)
    assert "\n" not in told and str(folder) in told and len(told) < 600
    assert "remove" in told


# fmt: off
_LEFTOVERS = ("a newer empty directory", "a newer save with half a file",
              "a newer save without metadata", "a newer save without its last file")
# fmt: on


@pytest.mark.parametrize("kind", _LEFTOVERS)
def test_an_interrupted_newer_save_is_told(folder, truth, kind):
    HARMLESS[kind](folder)
    (line,) = choose_checkpoint(folder).told
    assert line == f"{folder}: iter_0000006 is skipped: its save was interrupted"


@pytest.mark.parametrize("kind", _LEFTOVERS)
def test_a_run_that_died_in_its_first_save_starts_from_scratch(folder, kind):
    HARMLESS[kind](folder)
    for gone in (folder / OLDER, folder / NEWER):
        shutil.rmtree(gone)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        choose_checkpoint(folder)  # the tracker tells of a checkpoint that was there
    (folder / TRACKER).unlink()
    assert choose_checkpoint(folder) is None
    assert list_unfinished(folder) == ["iter_0000006"]


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_harms_no_data_costs_no_step(folder, truth, kind):
    HARMLESS[kind](folder)
    assert chosen(folder, truth) == NEWER


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("kind", PERMISSIONS)
def test_a_file_that_may_not_be_read_is_a_damaged_one(folder, truth, kind):
    PERMISSIONS[kind](folder)
    assert chosen(folder, truth) == OLDER


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in HARMFUL
        if MANIFEST not in kind and not any(word in kind for word in _NEEDS_MANIFEST)
    ],
)
def test_stock_checkpoints_are_judged_by_their_data_alone(originals, tmp_path, truth, kind):
    shutil.copytree(originals / "stock", tmp_path / "run")
    HARMFUL[kind](tmp_path / "run")
    assert chosen(tmp_path / "run", truth) == OLDER


_SLOWER = settings(
    deadline=None,
    max_examples=400,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@_SLOWER
@given(
    name=st.sampled_from([*DATA, METADATA, CONFIG, MANIFEST]),
    flips=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 7)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 10**9)),
    flavour=st.sampled_from(["ours", "stock"]),
)
def test_random_flips_and_cuts_never_load_a_wrong_state(
    originals, truth, name, flips, cut, flavour
):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(originals / flavour, Path(place, "run")))
        path = folder / NEWER / name
        if not path.exists():
            return
        data = path.read_bytes()
        for position, bit in flips:
            data = flip(data, position % len(data), bit)
        path.write_bytes(data if cut is None else data[: cut % len(data)])
        if flavour == "ours":
            chosen(folder, truth)
        else:
            _judge_stock(folder, truth)


def _judge_stock(folder: Path, truth: dict) -> None:
    """Without a manifest names may be damaged, which another model's would be refused for: what is
    there under its own name is right."""
    choice = choose_checkpoint(folder)
    try:
        found = read_state(choice.folder)
    except (Exception, CheckpointException):  # torch's own checks; nothing was loaded
        return
    expected = truth[choice.folder.name]
    assert {name: expected[name] for name in found if name in expected} == {
        name: value for name, value in found.items() if name in expected
    }


# --- which one is the newest -------------------------------------------------------------------


def test_the_step_that_was_asked_for_is_the_one_that_is_loaded(folder):
    assert choose_checkpoint(folder, 2).iteration == 2


def test_a_damaged_step_that_was_asked_for_is_refused_naming_the_newest_intact_one(folder):
    HARMFUL["data files exchanged"](folder)
    with pytest.raises(CheckpointError, match="--ckpt-step 4: .*; the newest intact .* 2$"):
        choose_checkpoint(folder, 4)
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* no such directory; .* 2$"):
        choose_checkpoint(folder, 3)


def test_a_run_that_went_back_continues_from_where_it_is_now(folder):
    (folder / NEWER).rename(folder / "iter_0000009")
    (folder / "iter_0000009" / MANIFEST).unlink()
    write_manifest(folder / "iter_0000009")
    write_manifest(folder / OLDER)  # saved again, later
    (folder / TRACKER).write_text("2")
    assert choose_checkpoint(folder).iteration == 2
    (folder / TRACKER).unlink()
    assert choose_checkpoint(folder).iteration == 2


def test_a_release_is_chosen_where_the_tracker_says_so_and_verified(folder):
    shutil.rmtree(folder / OLDER)
    (folder / NEWER).rename(folder / "release")
    (folder / "release" / MANIFEST).unlink()
    (folder / TRACKER).write_text("release")
    assert choose_checkpoint(folder).is_release
    path = folder / "release" / DATA[0]
    path.write_bytes(flip(path.read_bytes(), -98 - 20))  # in the last name of the zip directory
    with pytest.raises(CheckpointError, match="release: __0_0.distcp: "):
        choose_checkpoint(folder)


def test_an_empty_or_missing_directory_is_a_run_from_the_beginning(tmp_path):
    assert choose_checkpoint(tmp_path) is None
    assert choose_checkpoint(tmp_path / "missing") is None


def test_a_tracker_without_any_checkpoint_is_not_a_beginning(tmp_path):
    (tmp_path / TRACKER).write_text("4")
    with pytest.raises(CheckpointError, match=f"has {TRACKER}, but no checkpoint; remove"):
        choose_checkpoint(tmp_path)


def test_a_load_directory_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--load .*file: Not a directory"):
        choose_checkpoint(tmp_path / "file")
