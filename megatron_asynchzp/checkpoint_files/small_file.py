# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how the small files of a checkpoint are read and written. Must not know what they say."""

import hashlib
import os
from pathlib import Path

from megatron_asynchzp.checkpoint_files.errors import Damage


def hash_file(path: Path) -> str:
    """SHA-256 of a small file. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path) -> bytes | None:
    """The bytes of a file; None where there is none. Raises Damage where it cannot be read, or is
    something that opening would wait on."""
    try:
        if not path.is_file() and os.path.lexists(path):
            raise Damage(f"{path.name} is no file")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damage(f"{path.name}: {error.strerror}") from None


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
