# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the steps around the writing of a checkpoint: a clean directory before, a manifest after.

Collective: rank 0 changes names, all ranks read. One run at a time may write into a directory.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from typing import ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_asynchzp.checkpoint_files.errors import Damage, SaveError, one_line
from megatron_asynchzp.checkpoint_files.index import (
    COMMON,
    CONFIG,
    METADATA,
    items_by_file,
    pickle_index,
)
from megatron_asynchzp.checkpoint_files.manifest import (
    MANIFEST,
    SealedFile,
    digest_of_places,
    seal_file,
    write_manifest,
)
from megatron_asynchzp.checkpoint_files.peers import Peers, on_each, on_first
from megatron_asynchzp.checkpoint_files.small_files import replace_file, sync
from megatron_asynchzp.errors import ConfigurationError

# First what makes the rest look complete: a crash in between leaves something that does not. Each
# kind is gone from the disk before the next one is removed.
_LEFTOVERS = (MANIFEST, CONFIG, METADATA, COMMON, "__*_*.distcp")
_LEFTOVERS += (f"{MANIFEST}*.tmp", f"{METADATA}*.tmp")


def prepare_directory(iteration_dir: Path | str, peers: Peers | None = None) -> None:
    """Remove the files of an interrupted or older save. Raises SaveError, on all ranks."""

    def remove() -> None:
        for pattern in _LEFTOVERS:
            if paths := list(Path(iteration_dir).glob(pattern)):
                for path in paths:
                    path.unlink(missing_ok=True)
                sync(Path(iteration_dir))

    try:
        on_first(peers or Peers(), remove)
    except OSError as error:
        raise save_error(iteration_dir, one_line(error)) from None


def complete_directory(
    iteration_dir: Path | str,
    peers: Peers | None = None,
    amend: Callable[[Metadata], Metadata] = lambda index: index,
) -> None:
    """Write the manifest, after all data is on disk and before the tracker names the checkpoint.

    `peers` wrote the data; on rank 0 `amend` makes the index to be stored from the written one.
    Raises SaveError, on all ranks.
    """
    iteration_dir, peers = Path(iteration_dir), peers or Peers()
    try:
        # Each rank reads what it wrote itself: nothing has to be told to all of them.
        shares = on_each(peers, lambda: _seal_own(iteration_dir, peers.rank))
        sealed = {file.name: file for share in shares for file in share}
        on_first(peers, lambda: _complete(iteration_dir, amend, sealed))
    except (OSError, Damage) as error:
        raise save_error(iteration_dir, one_line(error)) from None


def _seal_own(iteration_dir: Path, rank: int) -> list[SealedFile]:
    names = (f"__{rank}_{number}.distcp" for number in count())
    paths = takewhile(Path.exists, (iteration_dir / name for name in names))
    return [seal_file(path) for path in paths]


def _complete(
    iteration_dir: Path, amend: Callable[[Metadata], Metadata], sealed: dict[str, SealedFile]
) -> None:
    index = amend(FileSystemReader(iteration_dir).read_metadata())
    replace_file(iteration_dir / METADATA, pickle_index(index))
    files = []
    for name, items in items_by_file(index).items():
        # What no rank has named: the ranks of a save and of its end may be others.
        file = sealed.get(name) or seal_file(iteration_dir / name)
        if file.places != digest_of_places(items):
            raise Damage(f"{name} does not hold what {METADATA} lists")
        files.append(file)
    write_manifest(iteration_dir, files)


def save_error(iteration_dir: Path | str, reason: str) -> SaveError:
    return SaveError(
        f"{iteration_dir} could not be saved: {reason}; earlier checkpoints are as they were"
    )


OWNER = "asynchzp_owner.txt"


class SaveLock:
    """A lock on a directory, held until the process ends, however it ends.

    A POSIX record lock: the kernel drops it with the process, also after SIGKILL, and children
    (which Megatron forks to write, and which can outlive it) do not inherit it. It holds between
    nodes on NFS and, mounted with `flock`, on Lustre. A file system without locks guards nothing,
    and a line is logged.
    """

    # File -> its descriptor. It is never opened twice: closing any would drop the lock.
    _held: ClassVar[dict[Path, int]] = {}

    @classmethod
    def claim(cls, save_dir: Path | str) -> str | None:
        """Own the directory, which is made if missing; a second call changes nothing.

        Returns a line for the user if the file system has no locks. Raises ConfigurationError if
        another process owns the directory, or it is not writable.
        """
        try:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            path = Path(save_dir).resolve() / OWNER
            if path in cls._held:
                return None
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"--save {save_dir}: {error.strerror}") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(file, 200).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise ConfigurationError(
                f"--save {save_dir}: another run is saving there ({owner}); end it, or give "
                "another --save"
            ) from None
        except OSError as error:  # this file system has no locks
            os.close(file)
            return f"--save {save_dir}: no protection against a second run ({error.strerror})"
        cls._held[path] = file
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        return None
