# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the manifest, which is written last and makes a checkpoint complete: the size of every file,
a checksum of each small one, a seal of each data file.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.checkpoint_files.archive import read_archives, seal_of
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.index import CONFIG, METADATA, Items
from megatron_asynchzp.checkpoint_files.small_files import (
    hash_file,
    read_small,
    replace_file,
    size_of,
    sync,
)

MANIFEST = "asynchzp_manifest.json"
_FORMAT = 1
_REMEDY = f"without {MANIFEST} it is judged by its data alone"


class FileRecord(NamedTuple):
    """What a file must be: its size, and the checksum of its bytes or the seal of its archives."""

    size: int
    sha256: str | None
    seal: str | None


class Manifest(NamedTuple):
    """saved_at: seconds since 1970, for saves to be ordered by: later than those of all others that
    were there, also where the clock was set back."""

    saved_at: float
    files: dict[str, FileRecord]


def seal_file(path: Path, items: Items) -> str:
    """The seal of a data file that was just written. Raises OSError, and Damage where it does not
    hold what the index lists."""
    with open(path, "rb") as file:
        archives = read_archives(file)
    if {(archive.start, archive.nbytes) for archive in archives} != items.keys():
        raise Damage(f"{path.name} does not hold what {METADATA} lists")
    return seal_of(archives)


def write_manifest(iteration_dir: Path, seals: Mapping[str, str]) -> None:
    """Make the checkpoint in this directory complete: atomically, and on disk on return.

    seals: of all data files. Raises OSError, and Damage for a file that is missing.
    """
    small = {METADATA, CONFIG, *(path.name for path in iteration_dir.glob("*.pt"))}
    files = {name: FileRecord(size_of(iteration_dir / name), None, seals[name]) for name in seals}
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
    """The manifest, or None where there is none. Raises Damage where it cannot be believed, and
    OSError."""
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
    now = time.time()
    for path in folder.glob(f"*/{MANIFEST}"):
        with suppress(Damage, OSError):
            if (other := read_manifest(path.parent)) is not None:
                now = max(now, math.nextafter(other.saved_at, math.inf))
    return now


def _checksum(fields: dict) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
