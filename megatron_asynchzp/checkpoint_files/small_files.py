# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how the small files of a checkpoint are read and replaced."""

import hashlib
import os
from pathlib import Path

from megatron_asynchzp.checkpoint_files.errors import Damage


def size_of(path: Path) -> int:
    """Return a file's bytes. Raises Damage if it is missing, or not a regular file."""
    if path.is_file():
        return path.stat().st_size
    raise Damage(f"{path.name} is {'no file' if os.path.lexists(path) else 'missing'}")


def read_small(path: Path) -> bytes:
    size_of(path)
    return path.read_bytes()


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, on disk on return. Raises OSError.

    A crash at any moment leaves the old file or the new one, whole.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
