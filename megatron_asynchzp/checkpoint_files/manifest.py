# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the manifest, which is written last and says that a checkpoint is complete: the size of
every file, a checksum of each small one, a seal of each data file. Must not know when it is asked
for.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_asynchzp.checkpoint_files.archive import Item, read_directory, seal_of
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.inventory import CONFIG, METADATA, read_inventory
from megatron_asynchzp.checkpoint_files.small_file import hash_file, read_small, replace_file

MANIFEST = "asynchzp_manifest.json"
_FORMAT = 1
_REMEDY = f"without {MANIFEST} it is judged by its data alone"


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size, and the checksum of its bytes or the seal of its items."""

    size: int
    sha256: str | None
    seal: str | None


@dataclass(frozen=True)
class Manifest:
    """iteration: the directory's name; saved_at: seconds since 1970, for saves to be ordered by."""

    iteration: str
    saved_at: float
    files: Mapping[str, FileRecord]


def seal_file(path: Path, items: tuple[Item, ...]) -> str:
    """The seal of a data file; reads the directories of its items only. Raises Damage, OSError."""
    with open(path, "rb") as file:
        return seal_of([read_directory(file, item)[2] for item in items])


def write_manifest(iteration_dir: Path | str, seals: Mapping[str, str] | None = None) -> None:
    """Say that the checkpoint in this directory is complete: atomically, and on disk on return.

    seals: of the data files, where they were made elsewhere (by all ranks together).
    Raises OSError, and Damage where the checkpoint is not complete after all.
    """
    iteration_dir = Path(iteration_dir)
    if seals is None:
        items_of = read_inventory(iteration_dir, is_trusted=True).files
        seals = {name: seal_file(iteration_dir / name, items) for name, items in items_of.items()}
    files = {}
    for path in sorted(iteration_dir.iterdir()):
        is_small = path.name in (METADATA, CONFIG) or path.suffix == ".pt"
        if path.name in seals or is_small:
            sha256 = None if path.name in seals else hash_file(path)
            files[path.name] = {
                "size": path.stat().st_size,
                "sha256": sha256,
                "seal": seals.get(path.name),
            }
    missing = ({METADATA, CONFIG} | set(seals)) - set(files)
    if missing:
        raise Damage(f"{sorted(missing)[0]} is missing")
    with open(iteration_dir / CONFIG, "rb") as config:
        os.fsync(config.fileno())  # Megatron does so for all the others
    told = {
        "format": _FORMAT,
        "iteration": iteration_dir.name,
        "saved_at": time.time(),
        "files": files,
    }
    text = json.dumps(told | {"checksum": _checksum(told)}, indent=1)
    replace_file(iteration_dir / MANIFEST, text)


def read_manifest(iteration_dir: Path) -> Manifest | None:
    """The manifest, or None where there is none. Raises Damage where it cannot be believed."""
    data = read_small(iteration_dir / MANIFEST)
    if data is None:
        return None
    try:
        told = json.loads(data)
        checksum = told.pop("checksum")
        is_whole = checksum == _checksum(told) and told["format"] == _FORMAT
        manifest = Manifest(
            told["iteration"],
            float(told["saved_at"]),
            {name: FileRecord(**record) for name, record in told["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damage(f"{MANIFEST} is damaged ({_REMEDY})") from None
    if not is_whole:
        raise Damage(f"{MANIFEST} is damaged or of another version ({_REMEDY})")
    if manifest.iteration != iteration_dir.name:
        raise Damage(f"it is a copy of {manifest.iteration}")
    return manifest


def _checksum(told: dict) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
