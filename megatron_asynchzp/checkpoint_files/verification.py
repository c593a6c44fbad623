# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the verdict over one checkpoint directory. A manifest proves every file; without one, as
stock Megatron saves, the files are compared with each other.
"""

import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.checkpoint_files.archive import (
    Archive,
    Record,
    check_records,
    read_archives,
    seal_of,
)
from megatron_asynchzp.checkpoint_files.common_state import COMMON
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.index import (
    CONFIG,
    METADATA,
    Items,
    items_by_file,
    unpickle_index,
)
from megatron_asynchzp.checkpoint_files.manifest import Manifest, read_manifest
from megatron_asynchzp.checkpoint_files.other_format import OTHER_FORMAT, is_of_format_torch
from megatron_asynchzp.checkpoint_files.peers import Peers, on_each, on_first
from megatron_asynchzp.checkpoint_files.small_files import hash_file, read_small, size_of

INTERRUPTED = "its save was interrupted"
_BUFFER_NBYTES = 1 << 16


class VerifyLevel(enum.StrEnum):
    """What is read of data files: the zip directories alone, also the records that hold no
    tensor's elements, or all records."""

    STRUCTURE = "structure"
    OBJECTS = "objects"
    FULL = "full"

    def reads(self, record: Record) -> bool:
        return self is VerifyLevel.FULL or (self is VerifyLevel.OBJECTS and not record.is_storage)


class DataFile(NamedTuple):
    """A data file, and what it must be: the file with this seal, or one that holds these items.
    With neither any archives will do."""

    name: str
    seal: str | None = None
    items: Items | None = None


def check_checkpoint(iteration_dir: Path, peers: Peers, level: VerifyLevel) -> None:
    """Judge all files of a checkpoint; each rank reads a share of the data files. Collective.
    Raises Damage, on all ranks, with the first thing that is wrong."""
    files = on_first(peers, lambda: _data_files(iteration_dir))
    mine = files[peers.rank :: peers.size]
    on_each(peers, lambda: [_check_file(iteration_dir, file, level) for file in mine])


@contextmanager
def _judging(name: str) -> Iterator[None]:
    """Whatever reading `name` leads to is damage to it."""
    try:
        yield
    except Damage as damage:
        raise Damage(f"{name}: {damage}" if name else str(damage)) from None
    except OSError as error:
        raise Damage(f"{name or Path(error.filename or '').name}: {error.strerror}") from None
    except Exception as error:  # damaged bytes can lead anywhere
        raise Damage(f"{name or 'it'} cannot be read ({type(error).__name__})") from None


def _data_files(iteration_dir: Path) -> list[DataFile]:
    """The files to read, all of them there, after the small files were judged. Raises Damage."""
    with _judging(""):
        manifest = read_manifest(iteration_dir)
        if manifest is not None:
            return _sealed_files(iteration_dir, manifest)
        _check_config(iteration_dir)
        index = read_small(iteration_dir / METADATA)
    with _judging(METADATA):
        items = items_by_file(unpickle_index(index))
    with _judging(""):
        for name in items:
            size_of(iteration_dir / name)
        files = [DataFile(name, items=of_file) for name, of_file in items.items()]
        return files + [DataFile(COMMON)] * (iteration_dir / COMMON).is_file()


def _sealed_files(iteration_dir: Path, manifest: Manifest) -> list[DataFile]:
    for name, record in manifest.files.items():
        path = iteration_dir / name
        if (size := size_of(path)) != record.size:
            raise Damage(f"{name} has {size} bytes, and had {record.size} when it was saved")
        if record.sha256 is not None and record.sha256 != hash_file(path):
            raise Damage(f"the checksum of {name} is wrong")
    return [DataFile(name, record.seal) for name, record in manifest.files.items() if record.seal]


def _check_config(iteration_dir: Path) -> None:
    """Megatron writes metadata.json last."""
    if not iteration_dir.is_dir():
        raise Damage("it is no directory")
    if not (iteration_dir / CONFIG).is_file() and is_of_format_torch(iteration_dir):
        raise Damage(OTHER_FORMAT)
    data = read_small(iteration_dir / CONFIG)
    with _judging(CONFIG):
        config = json.loads(data)
        kind, version = config["sharded_backend"], config["sharded_backend_version"]
        if kind != "torch_dist" or type(version) is not int:
            raise Damage("it is not the one of a torch_dist checkpoint")


def _check_file(iteration_dir: Path, wanted: DataFile, level: VerifyLevel) -> None:
    with _judging(wanted.name), open(iteration_dir / wanted.name, "rb", _BUFFER_NBYTES) as file:
        archives = read_archives(file)
        if wanted.seal is not None and wanted.seal != seal_of(archives):
            raise Damage("it is not the file that was saved")
        if wanted.items is not None:
            _compare(archives, wanted.items)
        if level is not VerifyLevel.STRUCTURE:
            check_records(file, archives, level.reads)


def _compare(archives: list[Archive], items: Items) -> None:
    if {(archive.start, archive.nbytes) for archive in archives} != items.keys():
        raise Damage(f"it does not hold what {METADATA} lists")
    for archive in archives:
        needed = items[archive.start, archive.nbytes]
        nbytes = sum(record.nbytes for record in archive.records() if record.is_storage)
        if nbytes < needed:
            raise Damage(f"a tensor has {nbytes} of {needed} bytes")
