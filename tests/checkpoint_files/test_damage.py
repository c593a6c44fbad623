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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint, repair_tracker
from megatron_asynchzp.checkpoint_files.index import IndexReader, index_read_once, read_common_state
from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError
from tests.support.checkpoint_damage import (
    CONFIG,
    DATA,
    HARMFUL,
    HARMLESS,
    MANIFEST,
    METADATA,
    NEWER,
    OLDER,
    PERMISSIONS,
    TRACKER,
    flip,
)
from tests.support.saved_state import read_state
from tests.support.selection import slow_unless

# What no one can know of a checkpoint without our manifest: that its files belong together.
_NEEDS_MANIFEST = (MANIFEST, "older", "exchanged", "forged", "copy")
_SEEN_WITHOUT_MANIFEST = [
    kind for kind in HARMFUL if not any(word in kind for word in _NEEDS_MANIFEST)
]

# What only reading the data shows.
_IN_DATA = {
    *(f"{DATA[0]} bit in record {name}" for name in ("data.pkl", "data/0", "byteorder")),
    *(f"{DATA[0]} bit in record {name}" for name in ("version", ".format_version")),
    *("a header's signature", "a header's name length", "a header's extra length"),
    "a header's name",
}
# What a seal shows, or the data.
_IN_DIRECTORIES = {"a directory's checksum", "a directory's name", "a directory's offset"}


def chosen(folder: Path, truth: dict) -> str:
    """The choice, after what torch loads from it has been compared with what was saved."""
    choice = choose_checkpoint(folder)
    assert read_state(choice.folder) == truth[choice.folder.name]
    assert all("\n" not in line for line in choice.lines)
    return choice.folder.name


def test_the_kinds_of_damage_are_many():
    assert len(HARMFUL) >= 105 and len(HARMLESS) >= 24 and len(PERMISSIONS) == 4


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_or_is_refused(folder, truth, kind):
    HARMFUL[kind](folder)
    assert chosen(folder, truth) == OLDER
    assert repair_tracker(folder, choose_checkpoint(folder)) is not None
    assert (folder / TRACKER).read_text() == "2"
    assert not Path("damaged").exists()
    shutil.rmtree(folder / OLDER)
    with pytest.raises(ConfigurationError) as refused:
        choose_checkpoint(folder)
    text = str(refused.value)
    assert "\n" not in text and str(folder) in text and len(text) < 600
    assert "remove" in text


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_harms_no_data_costs_no_step(folder, truth, kind):
    HARMLESS[kind](folder)
    assert chosen(folder, truth) == NEWER


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("kind", PERMISSIONS)
def test_a_file_that_may_not_be_read_is_a_damaged_one(folder, truth, kind):
    PERMISSIONS[kind](folder)
    assert chosen(folder, truth) == OLDER


@pytest.mark.parametrize("kind", _SEEN_WITHOUT_MANIFEST)
def test_stock_checkpoints_are_judged_by_their_data_alone(stock_folder, truth, kind):
    HARMFUL[kind](stock_folder)
    assert chosen(stock_folder, truth) == OLDER


def test_the_common_file_of_older_versions_of_megatron_is_judged_too(stock_folder):
    shutil.copyfile(stock_folder / NEWER / DATA[0], stock_folder / NEWER / "common.pt")
    assert choose_checkpoint(stock_folder).folder.name == NEWER
    data = (stock_folder / NEWER / "common.pt").read_bytes()
    (stock_folder / NEWER / "common.pt").write_bytes(data.replace(b"rank", b"renk"))
    assert choose_checkpoint(stock_folder).folder.name == OLDER


_SLOWER = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("num_examples", [60, slow_unless(False, 400)])
def test_random_flips_and_cuts_never_load_a_wrong_state(originals, truth, num_examples):
    @settings(_SLOWER, max_examples=num_examples)
    @given(
        name=st.sampled_from([*DATA, METADATA, CONFIG, MANIFEST]),
        flips=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 7)), min_size=1, max_size=4),
        cut=st.one_of(st.none(), st.integers(0, 10**9)),
        flavour=st.sampled_from(["ours", "stock"]),
    )
    def holds(name, flips, cut, flavour):
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

    holds()


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


# --- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HARMFUL)
def test_what_is_not_read_is_not_judged_and_all_else_is(folder, kind):
    HARMFUL[kind](folder)
    expected = NEWER if kind in _IN_DATA else OLDER
    assert choose_checkpoint(folder, level=VerifyLevel.STRUCTURE).folder.name == expected


@pytest.mark.parametrize("kind", HARMFUL)
def test_the_arguments_that_a_rank_reads_alone_are_those_that_were_saved(folder, kind):
    whole = read_common_state(folder / OLDER), read_common_state(folder / NEWER)
    HARMFUL[kind](folder)
    choice = choose_checkpoint(folder, level=VerifyLevel.ARGUMENTS)
    assert read_common_state(choice.folder) == whole[choice.folder.name == NEWER]


def test_a_rank_alone_opens_no_more_files_than_hold_the_arguments(folder):
    (folder / NEWER / DATA[1]).unlink()  # all ranks together miss it, before they load
    assert choose_checkpoint(folder, level=VerifyLevel.ARGUMENTS).folder.name == NEWER
    assert choose_checkpoint(folder, level=VerifyLevel.STRUCTURE).folder.name == OLDER


def test_within_a_load_the_index_is_read_once(folder, monkeypatch):
    read = []
    monkeypatch.setattr(
        FileSystemReader, "read_metadata", lambda self: read.append(self.path) or Metadata({})
    )
    with index_read_once():
        for _ in range(2):
            IndexReader(folder / NEWER).read_metadata()
            with index_read_once():
                IndexReader(folder / OLDER).read_metadata()
    assert sorted(read) == [folder / OLDER, folder / NEWER]
    IndexReader(folder / OLDER).read_metadata()
    assert len(read) == 3


@pytest.mark.parametrize("kind", _SEEN_WITHOUT_MANIFEST)
def test_without_a_manifest_structure_judges_all_but_the_zip_directories(stock_folder, kind):
    HARMFUL[kind](stock_folder)
    expected = NEWER if kind in _IN_DATA | _IN_DIRECTORIES else OLDER
    choice = choose_checkpoint(stock_folder, level=VerifyLevel.STRUCTURE)
    assert choice.folder.name == expected
