# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Data files, small files and the work of several ranks, one law each."""

import io
import json
import os
import pickle
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

from megatron_asynchzp.checkpoint_files.archive import check_records, read_archives, seal_of
from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint
from megatron_asynchzp.checkpoint_files.errors import Damage, SaveError
from megatron_asynchzp.checkpoint_files.index import items_by_file, pickle_index, unpickle_index
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST
from megatron_asynchzp.checkpoint_files.peers import Peers
from megatron_asynchzp.checkpoint_files.saving import complete_directory, prepare_directory
from megatron_asynchzp.checkpoint_files.small_files import replace_file
from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError
from tests.support.checkpoint_damage import CONFIG, DATA, METADATA, NEWER, OLDER, flip


def _check(path: Path) -> list[str]:
    """Names of all records, after their checksums were compared."""
    with open(path, "rb") as file:
        archives = read_archives(file)
        check_records(file, archives, lambda record: True)
        return [record.name.decode() for one in archives for record in one.records()]


def test_numbers_of_64_bits_are_read_from_where_large_archives_keep_them(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 40)  # as if every record had more than 4 GiB
    path = tmp_path / "file"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"p" * 100)
        archive.writestr("archive/data/0", bytes(range(256)))
    assert b"\xff\xff\xff\xff" in path.read_bytes()
    assert _check(path) == ["archive/data.pkl", "archive/data/0"]
    data = path.read_bytes()
    path.write_bytes(flip(data, data.index(bytes(range(256))) + 77))
    with pytest.raises(Damage, match="the checksum of record archive/data/0 is wrong"):
        _check(path)


def test_a_directory_longer_than_one_read_is_read_whole(tmp_path):
    tensors, path = [torch.tensor([i]) for i in range(300)], tmp_path / "file"
    for data in (tensors, tensors[:1]):
        with open(path, "ab") as file:
            buffer = io.BytesIO()
            torch.save(data, buffer)
            file.write(buffer.getvalue())
    assert sum("/data/" in name for name in _check(path)) == 301


def test_a_seal_changes_with_every_bit_of_the_data_it_stands_for(tmp_path):
    seals, path = set(), tmp_path / "file"
    for bit in range(8):
        torch.save(torch.tensor([1 << bit], dtype=torch.uint8), path)
        with open(path, "rb") as file:
            seals.add(seal_of(read_archives(file)))
    assert len(seals) == 8


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync" if step == "write" else "replace", fail)
    with pytest.raises(OSError):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_save_finds_nothing_of_an_older_one_and_what_is_not_its_own_stays(folder):
    mine = folder / NEWER / "notes.txt"
    mine.write_text("mine")
    prepare_directory(folder / NEWER)
    assert list((folder / NEWER).iterdir()) == [mine]
    prepare_directory(folder / "not there yet")


@pytest.mark.parametrize("gone", [DATA[0], CONFIG, METADATA])
def test_a_save_without_one_of_its_files_is_no_success(stock_folder, gone):
    (stock_folder / NEWER / gone).unlink()
    with pytest.raises(SaveError, match="could not be saved: .*; earlier checkpoints are as they"):
        complete_directory(stock_folder / NEWER)
    assert not (stock_folder / NEWER / MANIFEST).exists()


def test_a_save_whose_data_file_is_of_another_step_is_no_success(stock_folder):
    data = (stock_folder / OLDER / DATA[0]).read_bytes()
    (stock_folder / NEWER / DATA[0]).write_bytes(data + data)
    with pytest.raises(SaveError, match="__0_0.distcp does not hold what .metadata lists"):
        complete_directory(stock_folder / NEWER)


def test_only_the_names_of_one_tensor_may_share_a_place(stock_folder):
    index, name = (
        FileSystemReader(stock_folder / NEWER).read_metadata(),
        "optimizer.state.param.bias",
    )
    index.state_dict_metadata[name] = index.state_dict_metadata["bias"]
    places = index.storage_data
    places |= {replace(one, fqn=name): at for one, at in places.items() if one.fqn == "bias"}
    assert items_by_file(index).keys() == set(DATA)
    weight, bias = (next(e for e in places if e.fqn == name) for name in ("weight", "bias"))
    places[weight] = places[bias]
    with pytest.raises(Damage, match="lies where another tensor does"):
        items_by_file(index)


# --- what is read ------------------------------------------------------------------------------


def _bytes_read(act: Callable[[], Any]) -> int:
    def count() -> int:
        words = Path("/proc/self/io").read_text().split()
        return int(words[words.index("rchar:") + 1])

    before = count()
    act()
    return count() - before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count reads")
@pytest.mark.parametrize("has_manifest", [True, False])
def test_every_byte_is_read_once_or_hardly_any(tmp_path, has_manifest):
    folder, nbytes = tmp_path / NEWER, 8 << 20
    folder.mkdir()
    writer = checkpoint.FileSystemWriter(folder, thread_count=2)
    tensors = {str(i): torch.zeros(nbytes // 4, dtype=torch.uint8) for i in range(4)}
    checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(config))
    if has_manifest:
        assert _bytes_read(lambda: complete_directory(folder)) < 200_000
    assert _bytes_read(lambda: choose_checkpoint(tmp_path, level=VerifyLevel.STRUCTURE)) < 200_000
    assert _bytes_read(lambda: choose_checkpoint(tmp_path, level=VerifyLevel.ARGUMENTS)) < 600_000
    assert nbytes < _bytes_read(lambda: choose_checkpoint(tmp_path)) < nbytes + 600_000


# --- several ranks -----------------------------------------------------------------------------


class _Threads(Peers):
    """Peers that are threads of this process."""

    def __init__(self, rank: int, size: int, box: list, barrier: threading.Barrier):
        self.rank, self.size, self._box, self._barrier = rank, size, box, barrier

    def gather(self, mine: Any) -> list[Any]:
        self._box[self.rank] = mine
        self._barrier.wait(10)
        everything = list(self._box)
        self._barrier.wait(10)
        return everything

    def broadcast(self, mine: Any) -> Any:
        return self.gather(mine)[0]


def _on_threads(size: int, act) -> list[Any]:
    box, barrier, results = [None] * size, threading.Barrier(size), [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = act(_Threads(rank, size, box, barrier))
        except (ConfigurationError, SaveError) as error:
            results[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", DATA)
def test_all_ranks_come_to_the_same_verdict_whichever_rank_reads_the_damaged_file(
    folder, size, name
):
    def choose(peers: _Threads) -> Any:
        return choose_checkpoint(folder, peers=peers)

    assert len(set(_on_threads(size, choose))) == 1
    for iteration in (NEWER, OLDER):
        path = folder / iteration / name
        path.write_bytes(flip(path.read_bytes(), -1))
        first, *others = _on_threads(size, choose)
        assert all(other == first for other in others)
        assert (name in first) if iteration == OLDER else (first.folder.name == OLDER)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_complete_a_save_or_none_does(stock_folder, size):
    def complete(peers: _Threads) -> Any:
        return complete_directory(stock_folder / NEWER, peers)

    (stock_folder / NEWER / DATA[1]).rename(stock_folder / "away")
    first, *others = _on_threads(size, complete)
    assert first.startswith("SaveError: ") and all(other == first for other in others)
    (stock_folder / "away").rename(stock_folder / NEWER / DATA[1])
    assert _on_threads(size, complete) == [None] * size
    assert (stock_folder / NEWER / MANIFEST).exists()


def test_an_index_that_a_newer_torch_wrote_is_stored_as_older_ones_read_it(tmp_path, monkeypatch):
    """torch 2.15 pickles one property of a tensor more, which torch 2.13 does not unpack."""
    get_state, set_state = TensorProperties.__getstate__, TensorProperties.__setstate__
    lengths: list[int] = []

    def read(self: TensorProperties, state: tuple) -> None:
        lengths.append(len(state))
        set_state(self, state)

    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*get_state(self)[:5], (1,)))
    monkeypatch.setattr(
        TensorProperties, "__setstate__", lambda self, state: set_state(self, state[:5])
    )
    checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    (tmp_path / CONFIG).write_text("{}")
    complete_directory(tmp_path)
    monkeypatch.setattr(TensorProperties, "__setstate__", read)
    FileSystemReader(tmp_path).read_metadata()
    assert lengths == [5]


def test_a_path_in_an_index_is_read_in_every_version_of_python(tmp_path):
    """Python 3.13 has its class in pathlib._local, which no other has."""
    index = pickle.dumps(tmp_path, protocol=0)
    assert b"cpathlib\n" in index or b"cpathlib._local\n" in index
    moved = index.replace(b"cpathlib\n", b"cpathlib._local\n")
    assert unpickle_index(index) == unpickle_index(moved) == tmp_path
    stored = pickle_index(Metadata({}, storage_meta=StorageMeta(checkpoint_id=tmp_path)))
    assert b"pathlib" not in stored
    assert unpickle_index(stored).storage_meta == StorageMeta(checkpoint_id=str(tmp_path))
