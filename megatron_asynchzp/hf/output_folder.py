# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a directory completely or not at all, and says how far it is."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError

type Progress = Callable[[Iterable, int], Iterable]
"""Yields the steps of its first argument, whose number is the second."""


def no_progress(steps: Iterable, total: int) -> Iterable:
    return steps


def check_unoccupied(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists and is not empty; name another folder")


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `folder`, which is renamed to it at the end.

    It is removed if the context ends with an exception.
    """
    check_unoccupied(folder)
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
