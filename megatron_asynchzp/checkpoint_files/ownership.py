# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the right to write checkpoints into a directory: one run at a time. Must not know what is
written.
"""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

from megatron_asynchzp.checkpoint_files.errors import CheckpointError

OWNER = "asynchzp_owner.txt"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Ownership:
    """A lock on one directory, held until the process ends, however it ends.

    A POSIX record lock: the kernel drops it with the process, also after SIGKILL, and children
    (which Megatron forks to write, and which can outlive it) do not inherit it. It holds between
    nodes on NFS and, mounted with `flock`, on Lustre; where a file system has no locks, nothing
    is guarded, and that is told.
    """

    _held: ClassVar[dict[Path, "Ownership"]] = {}

    def __init__(self, path: Path, file: int):
        self._path, self._file = path, file

    @classmethod
    def claim(cls, save_dir: Path | str) -> str | None:
        """Own the directory, which is made where it is missing; again is the same as once.

        Returns a line for the user where it could not be guarded. Raises CheckpointError where
        another process owns it, or it cannot be written to.
        """
        folder = Path(save_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder.resolve() / OWNER
            # The file is never opened twice: closing any descriptor of it would drop the lock.
            if path in cls._held:
                return None
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"--save {save_dir}: {error.strerror}") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            if error.errno in _NO_LOCKS:
                return f"--save {save_dir}: no protection against a second run ({error.strerror})"
            told = f"another run is saving there ({owner or 'unknown'})"
            raise CheckpointError(
                f"--save {save_dir}: {told}; end it, or give another --save"
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        cls._held[path] = cls(path, file)
        return None

    def release(self) -> None:
        """Let others write; for tests, and for runs that go on after training."""
        Ownership._held.pop(self._path, None)
        os.close(self._file)

    @classmethod
    def release_all(cls) -> None:
        for ownership in list(cls._held.values()):
            ownership.release()
