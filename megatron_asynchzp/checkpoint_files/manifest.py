# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the manifest, which is written last and makes a checkpoint complete.

It has the size of every file, a checksum of each small one, and a seal of each data file.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.checkpoint_files.archive import read_archives, seal_of
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.index import CONFIG, METADATA
from megatron_asynchzp.checkpoint_files.small_files import (
    hash_file,
    read_small,
    replace_file,
    size_of,
    sync,
)

MANIFEST = "asynchzp_manifest.json"
_FORMAT = 1
# The time stands before the files, which may be many thousands.
_SAVED_AT, _HEAD_NBYTES = re.compile(rb'"saved_at": ([0-9.e+]{1,30}),'), 300
_REMEDY = f"without {MANIFEST} it is judged by its data alone"


class FileRecord(NamedTuple):
    """Required size of a file, and the checksum of its bytes or the seal of its archives."""

    size: int
    sha256: str | None
    seal: str | None


class Manifest(NamedTuple):
    """The manifest of a checkpoint."""

    # seconds since 1970, later than every save that was there, even if the clock was set back
    saved_at: float
    files: dict[str, FileRecord]


class SealedFile(NamedTuple):
    """A data file that was just written."""

    name: str
    size: int
    seal: str
    # digest of its archives' places, to be compared with the index that another rank reads
    places: str


def seal_file(path: Path) -> SealedFile:
    with open(path, "rb") as file:
        try:
            archives = read_archives(file)
        except Damage as damage:
            raise Damage(f"{path.name}: {damage}") from None
    places = digest_of_places((archive.start, archive.nbytes) for archive in archives)
    return SealedFile(
        path.name, archives[-1].start + archives[-1].nbytes, seal_of(archives), places
    )


def digest_of_places(places: Iterable[tuple[int, int]]) -> str:
    return hashlib.sha256(repr(sorted(places)).encode()).hexdigest()


def write_manifest(iteration_dir: Path, sealed: Iterable[SealedFile]) -> None:
    """Make this directory's checkpoint complete: atomically, and on disk on return.

    `sealed` are all data files. Raises OSError, or Damage if a file is missing.
    """
    small = {METADATA, CONFIG, *(path.name for path in iteration_dir.glob("*.pt"))}
    files = {file.name: FileRecord(file.size, None, file.seal) for file in sealed}
    for name in small:
        path = iteration_dir / name
        files[name] = FileRecord(size_of(path), hash_file(path), None)
    sync(iteration_dir / CONFIG)  # Megatron does so for all the others
    sync(iteration_dir.parent)  # the name of the directory
    fields = {
        "format": _FORMAT,
        "iteration": iteration_dir.name,
        "saved_at": _time_after_all_saves_in(iteration_dir.parent),
        "files": {name: record._asdict() for name, record in sorted(files.items())},
    }
    text = json.dumps(fields | {"checksum": _checksum(fields)}, indent=1)
    replace_file(iteration_dir / MANIFEST, text.encode())


def read_manifest(iteration_dir: Path) -> Manifest | None:
    """Read the manifest; None if there is none. Raises OSError, or Damage if it is not intact."""
    if not (iteration_dir / MANIFEST).exists(follow_symlinks=False):
        return None
    data = read_small(iteration_dir / MANIFEST)
    try:
        fields = json.loads(data)
        is_whole = fields.pop("checksum") == _checksum(fields) and fields["format"] == _FORMAT
    except Exception:  # damaged JSON can be anything
        is_whole = False
    if not is_whole:
        raise Damage(f"{MANIFEST} is damaged or of another version ({_REMEDY})")
    if fields["iteration"] != iteration_dir.name:
        raise Damage(f"it is a copy of {fields['iteration']}")
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Manifest(fields["saved_at"], files)


def _time_after_all_saves_in(folder: Path) -> float:
    """Return now, or just after the latest time in a manifest, so that saves stay in order."""
    now = time.time()
    for path in folder.glob(f"*/{MANIFEST}"):
        with suppress(OSError, ValueError), open(path, "rb") as file:
            if (match := _SAVED_AT.search(file.read(_HEAD_NBYTES))) is not None:
                saved_at = float(match[1])
                now = max(now, math.nextafter(saved_at, math.inf))
    return now


def _checksum(fields: dict) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
