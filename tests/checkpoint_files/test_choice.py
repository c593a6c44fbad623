# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several checkpoints is the newest, and what a run without any does."""

import shutil
import time
from argparse import Namespace

import pytest

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint, list_unfinished
from megatron_asynchzp.checkpoint_files.saving import complete_directory
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.load_guard import guard_load_checkpoint
from tests.support.checkpoint_damage import (
    DATA,
    HARMFUL,
    HARMLESS,
    MANIFEST,
    NEWER,
    OLDER,
    TRACKER,
    flip,
)

# fmt: off
_LEFTOVERS = ("a newer empty directory", "a newer save with half a file",
              "a newer save without metadata", "a newer save without its last file")
# fmt: on


@pytest.mark.parametrize("kind", _LEFTOVERS)
def test_an_interrupted_newer_save_is_logged_and_where_it_was_the_first_is_no_checkpoint(
    folder, kind
):
    HARMLESS[kind](folder)
    (line,) = choose_checkpoint(folder).lines
    assert line == f"{folder}: iter_0000006 is skipped: its save was interrupted"
    for gone in (folder / OLDER, folder / NEWER):
        shutil.rmtree(gone)
    with pytest.raises(ConfigurationError, match="no intact checkpoint"):
        choose_checkpoint(folder)  # the tracker names a checkpoint that was there
    (folder / TRACKER).unlink()
    assert choose_checkpoint(folder) is None
    assert list_unfinished(folder) == ["iter_0000006"]


def test_the_step_that_was_asked_for_is_the_one_that_is_loaded(folder):
    assert choose_checkpoint(folder, 2).iteration == 2


@pytest.mark.parametrize("step, tracker", [(2, "4"), (4, "2"), (None, "4")])
def test_a_load_of_a_step_leaves_the_tracker_and_a_load_of_the_newest_corrects_it(
    folder, step, tracker
):
    (folder / TRACKER).write_text("2" if step is None else tracker)
    args = Namespace(save=None, load=str(folder), ckpt_step=step, pretrained_checkpoint=None)
    args.finetune, args.asynchzp_verify = True, "full"
    loaded = guard_load_checkpoint(lambda: args.ckpt_step, args, "load")
    assert loaded == (step or 4)
    assert (folder / TRACKER).read_text() == tracker


def test_a_damaged_step_that_was_asked_for_is_refused_naming_the_newest_intact_one(folder):
    HARMFUL["data files exchanged"](folder)
    HARMLESS["a newer empty directory"](folder)
    with pytest.raises(ConfigurationError, match="--ckpt-step 4: .*; the newest intact .* 2$"):
        choose_checkpoint(folder, 4)
    with pytest.raises(ConfigurationError, match="--ckpt-step 3: .* no such directory; .* 2$"):
        choose_checkpoint(folder, 3)
    with pytest.raises(
        ConfigurationError, match="--ckpt-step 6: .* its save was interrupted; .* 2$"
    ):
        choose_checkpoint(folder, 6)


def test_a_run_that_went_back_continues_from_where_it_is_now(folder):
    (folder / NEWER).rename(folder / "iter_0000009")
    (folder / "iter_0000009" / MANIFEST).unlink()
    complete_directory(folder / "iter_0000009")
    complete_directory(folder / OLDER)  # saved again, later
    (folder / TRACKER).write_text("2")
    assert choose_checkpoint(folder).iteration == 2
    (folder / TRACKER).unlink()
    assert choose_checkpoint(folder).iteration == 2
    shutil.rmtree(folder / OLDER)
    assert choose_checkpoint(folder).iteration == 9  # better than nothing


def test_where_the_clock_was_set_back_a_save_is_still_later_than_those_before(folder, monkeypatch):
    """Else a run that went back would go on from the step that it left behind."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    (folder / OLDER / MANIFEST).unlink()
    complete_directory(folder / OLDER)  # saved again
    for tracker in ("2", ""):
        (folder / TRACKER).write_text(tracker)
        assert choose_checkpoint(folder).iteration == 2
    complete_directory(folder / NEWER)
    assert choose_checkpoint(folder).iteration == 4


def test_without_manifests_the_tracker_decides_whatever_times_a_copy_has(stock_folder):
    (stock_folder / OLDER / "metadata.json").touch()
    assert choose_checkpoint(stock_folder).folder.name == NEWER
    (stock_folder / TRACKER).unlink()
    assert choose_checkpoint(stock_folder).folder.name == NEWER


def test_a_release_is_chosen_where_the_tracker_names_it_and_verified(folder):
    shutil.rmtree(folder / OLDER)
    (folder / NEWER).rename(folder / "release")
    (folder / "release" / MANIFEST).unlink()
    (folder / TRACKER).write_text("release")
    choice = choose_checkpoint(folder)
    assert choice.is_release and choice.iteration == 0
    path = folder / "release" / DATA[0]
    path.write_bytes(flip(path.read_bytes(), -98 - 20))  # in the last name of the zip directory
    with pytest.raises(ConfigurationError, match="release: __0_0.distcp: "):
        choose_checkpoint(folder)


def test_a_checkpoint_of_megatrons_older_format_is_not_called_interrupted(folder):
    """Nor is it chosen; a run with one alone, or asked for one, gets the way to convert it."""
    (folder / "iter_0000006" / "mp_rank_00").mkdir(parents=True)
    choice = choose_checkpoint(folder)
    assert choice.iteration == 4 and "convert it" in choice.lines[0]
    with pytest.raises(ConfigurationError, match="of Megatron's format torch.*convert it"):
        choose_checkpoint(folder, 6)
    for gone in (folder / OLDER, folder / NEWER):
        shutil.rmtree(gone)
    with pytest.raises(ConfigurationError, match="of Megatron's format torch.*convert it"):
        choose_checkpoint(folder)
    (folder / TRACKER).unlink()
    with pytest.raises(ConfigurationError, match="of Megatron's format torch.*convert it"):
        choose_checkpoint(folder)


def test_an_empty_or_missing_directory_is_a_run_from_the_beginning(tmp_path):
    assert choose_checkpoint(tmp_path) is None
    assert choose_checkpoint(tmp_path / "missing") is None


def test_a_tracker_without_any_checkpoint_is_not_a_beginning(tmp_path):
    (tmp_path / TRACKER).write_text("4")
    with pytest.raises(ConfigurationError, match=f"has {TRACKER}, but no checkpoint; remove"):
        choose_checkpoint(tmp_path)
