# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the verdict on a checkpoint directory.

A manifest proves every file. Without one, as stock Megatron saves, the files are compared with each
other. Ranks examine a directory together: all return the same or raise the same.
"""

import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_asynchzp.checkpoint_files.archive import (
    Archive,
    Record,
    check_records,
    read_archives,
    seal_of,
)
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.index import (
    COMMON,
    COMMON_OBJECT,
    CONFIG,
    METADATA,
    IndexReader,
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
    """How much of the data files is read."""

    # Megatron's arguments; without a manifest, all records except tensors' elements
    ARGUMENTS = "arguments"
    STRUCTURE = "structure"  # the zip directories alone
    FULL = "full"  # all records

    def reads(self, record: Record) -> bool:
        if record.is_storage:
            return self is VerifyLevel.FULL
        return self is not VerifyLevel.STRUCTURE


class DataFile(NamedTuple):
    """A data file, with its required seal and size or its required items, if either is known."""

    name: str
    seal: str | None = None
    items: Items | None = None
    size: int | None = None


def check_checkpoint(iteration_dir: Path, peers: Peers, level: VerifyLevel) -> None:
    """Judge all files of a checkpoint; each rank reads a share of the data files.

    Collective. Raises Damage with the first fault, on all ranks.
    """
    files = on_first(peers, lambda: _data_files(iteration_dir, level))
    mine = files[peers.rank :: peers.size]
    on_each(peers, lambda: [_check_file(iteration_dir, file, level) for file in mine])


@contextmanager
def _judging(name: str) -> Iterator[None]:
    """Raise Damage for whatever reading `name` leads to."""
    try:
        yield
    except Damage as damage:
        raise Damage(f"{name}: {damage}" if name else str(damage)) from None
    except OSError as error:
        raise Damage(f"{name or Path(error.filename or '').name}: {error.strerror}") from None
    except Exception as error:  # damaged bytes can lead anywhere
        raise Damage(f"{name or 'it'} cannot be read ({type(error).__name__})") from None


def _data_files(iteration_dir: Path, level: VerifyLevel) -> list[DataFile]:
    """Judge the small files, and list the data files, all of them present. Raises Damage."""
    with _judging(""):
        manifest = read_manifest(iteration_dir)
        if manifest is not None:
            files = _sealed_files(iteration_dir, manifest)
            if level is VerifyLevel.ARGUMENTS:
                places = IndexReader(iteration_dir).read_metadata().storage_data
                place = places.get(MetadataIndex(COMMON_OBJECT))
                return [it for it in files if place is not None and it.name == place.relative_path]
            return files
        _check_config(iteration_dir)
        index = read_small(iteration_dir / METADATA)
    with _judging(METADATA):
        items = items_by_file(unpickle_index(index))
    with _judging(""):
        files = [DataFile(name, items=of_file) for name, of_file in items.items()]
        return files + [DataFile(COMMON)] * (iteration_dir / COMMON).is_file()


def _sealed_files(iteration_dir: Path, manifest: Manifest) -> list[DataFile]:
    for name, record in manifest.files.items():
        if record.sha256 is not None:
            path = iteration_dir / name
            _check_size(path, record.size)
            if record.sha256 != hash_file(path):
                raise Damage(f"the checksum of {name} is wrong")
    return [
        DataFile(name, record.seal, size=record.size)
        for name, record in manifest.files.items()
        if record.sha256 is None
    ]


def _check_size(path: Path, expected: int | None) -> None:
    if (size := size_of(path)) != expected and expected is not None:
        raise Damage(f"{path.name} has {size} bytes, and had {expected} when it was saved")


def _check_config(iteration_dir: Path) -> None:
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
    with _judging(""):
        _check_size(iteration_dir / wanted.name, wanted.size)
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
