# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns that a directory is written completely or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError


def refuse_occupied(folder: Path) -> None:
    """Raise ConfigurationError where `folder` is there with something in it, or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is there already and not empty; name another")


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """A directory beside `folder` to write into; it takes that name when the block ends well, and
    is removed when it does not."""
    refuse_occupied(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp keeps others out
        yield partial
        os.rename(partial, folder)  # also over an empty directory
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
