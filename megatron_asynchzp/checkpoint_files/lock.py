# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the right to write checkpoints into a directory: one run at a time."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

from megatron_asynchzp.errors import ConfigurationError

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

    @classmethod
    def release_all(cls) -> None:
        """Let others write; for tests, and for runs that go on after training."""
        while cls._held:
            os.close(cls._held.popitem()[1])
