# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A loss of power at any moment of a save leaves what can be loaded, or what does not look like a
checkpoint. A disk that promises no more than fsync does stands in for the real one."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint, list_unfinished
from megatron_asynchzp.checkpoint_files.manifest import read_manifest
from megatron_asynchzp.checkpoint_files.saving import complete_directory, prepare_directory
from tests.support.checkpoint_damage import CONFIG, NEWER, OLDER
from tests.support.saved_state import read_state


class Disk:
    """Of a folder, what is left of it when the power goes: of a file its bytes when it was synced
    last, of a directory its names when it was synced last.

    durable: files whose bytes are there already; of directories, those of OLDER.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, durable: list[Path]):
        self._root, self._graves = root, root.with_name("graves")
        self._graves.mkdir()
        self._bytes = {path.stat().st_ino: path.read_bytes() for path in durable}
        self._names: dict[Path, dict[str, int]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._note_names(root / OLDER)
        self._names[root] = {OLDER: 0}
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self._noted_fsync)
        monkeypatch.setattr(os, "replace", self._noted_replace)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this before and after whatever changes what is left."""
        self._on_change = on_change

    def _note_names(self, folder: Path) -> None:
        self._names[folder] = {path.name: path.stat().st_ino for path in folder.iterdir()}

    def _noted_fsync(self, descriptor: int) -> None:
        self._on_change()
        path = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._note_names(path)
        else:
            self._bytes[path.stat().st_ino] = path.read_bytes()
        self._fsync(descriptor)
        self._on_change()

    def _noted_replace(self, old: Path, new: Path) -> None:
        if os.path.exists(new):  # keeps the system from using its number for another file
            os.link(new, self._graves / str(len(os.listdir(self._graves))))
        self._on_change()
        self._replace(old, new)
        self._on_change()

    def lose_power(self, place: Path) -> Path:
        """A folder with what is left."""
        for folder in self._names[self._root]:
            (place / folder).mkdir(parents=True)
            for name, number in self._names.get(self._root / folder, {}).items():
                (place / folder / name).write_bytes(self._bytes.get(number, b""))
        return place


def _places(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / f"left-{number}" for number in range(1000))


def _amended(index):
    return replace(index, storage_data=dict(index.storage_data))  # as after other names were added


def test_a_complete_checkpoint_survives_and_any_moment_before_leaves_one_to_load(
    stock_folder, truth, tmp_path, monkeypatch
):
    complete_directory(stock_folder / OLDER)
    newer = [path for path in (stock_folder / NEWER).iterdir() if path.name != CONFIG]
    disk = Disk(stock_folder, monkeypatch, [*(stock_folder / OLDER).iterdir(), *newer])
    places, moments = _places(tmp_path), []

    def judge(folder: Path) -> str:
        choice = choose_checkpoint(folder)
        assert choice is not None
        assert read_state(choice.folder) == truth[choice.folder.name]
        return choice.folder.name

    def at_any_moment() -> None:
        moments.append(judge(disk.lose_power(next(places))))
        assert judge(stock_folder) == NEWER  # the run is killed, the power stays

    assert judge(disk.lose_power(next(places))) == OLDER
    disk.watch(at_any_moment)
    complete_directory(stock_folder / NEWER, amend=_amended)
    assert len(moments) > 10 and moments == sorted(moments)
    assert judge(disk.lose_power(next(places))) == NEWER


def _left_of_removal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The files of NEWER that may be left, when the power goes after each removal of one: those
    removals that no sync has followed may be on disk or not, each for itself."""
    whole, gone, since = {path.name for path in (folder / NEWER).iterdir()}, set(), []
    left = [whole]
    fsync, unlink = os.fsync, Path.unlink

    def noted_fsync(descriptor: int) -> None:
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(folder / NEWER):
            gone.update(since)
            since.clear()
        fsync(descriptor)

    def noted_unlink(path: Path, **options: bool) -> None:
        since.append(path.name)
        some = chain.from_iterable(combinations(since, n) for n in range(len(since) + 1))
        left.extend(whole - gone - set(one) for one in some)
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noted_fsync)
        patched.setattr(Path, "unlink", noted_unlink)
        prepare_directory(folder / NEWER)
    yield from map(set, dict.fromkeys(map(frozenset, left)))


@pytest.mark.parametrize("flavour", ["folder", "stock_folder"])
def test_what_is_left_of_a_removal_is_whole_or_does_not_look_complete(
    flavour, request, truth, tmp_path, monkeypatch
):
    folder = request.getfixturevalue(flavour)
    shutil.rmtree(folder / OLDER)
    whole = Path(shutil.copytree(folder / NEWER, tmp_path / "whole"))
    verdicts = []
    for place, names in zip(_places(tmp_path), _left_of_removal(folder, monkeypatch), strict=False):
        (place / NEWER).mkdir(parents=True)
        for name in names:
            shutil.copyfile(whole / name, place / NEWER / name)
        verdicts.append(list_unfinished(place) == [NEWER])
        if not verdicts[-1]:
            assert read_state(choose_checkpoint(place).folder) == truth[NEWER], names
    assert not verdicts[0] and verdicts[-1] and verdicts == sorted(verdicts)


def test_megatron_syncs_all_that_a_manifest_names_but_for_the_file_that_we_sync(originals):
    synced = set((originals / "synced.txt").read_text().split())
    for name in (OLDER, NEWER):
        manifest = read_manifest(originals / "ours" / name)
        assert manifest is not None
        unsynced = {file for file in manifest.files if f"{name}/{file}" not in synced}
        assert unsynced <= {CONFIG}
