# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the progress lines of a long save or load."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY_S = 10.0
_MANY_FILES = 64
_PROCESS_IO = Path("/proc/self/io")


@contextmanager
def log_progress(
    action: str, count_bytes: Callable[[], int], is_logged: bool = True, every_s: float = _EVERY_S
) -> Iterator[None]:
    """Print the bytes done each `every_s` seconds; count_bytes runs in a thread of its own."""
    if not is_logged:
        yield
        return
    is_done, start_s, start = threading.Event(), time.monotonic(), _count(count_bytes)

    def watch() -> None:
        while not is_done.wait(every_s):
            gib = (_count(count_bytes) - start) / 2**30
            seconds = time.monotonic() - start_s
            print(f"megatron_asynchzp: {action}: {gib:.2f} GiB after {seconds:.0f} s", flush=True)

    watcher = threading.Thread(target=watch, name="asynchzp-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()


def _count(count_bytes: Callable[[], int]) -> int:
    try:
        return count_bytes()
    except (OSError, ValueError):  # a file that was renamed just now; no such system
        return 0


def bytes_in(directory: Path | str) -> int:
    """Return the size of all files in `directory`, estimated from some if they are many."""
    paths = list(Path(directory).iterdir())
    asked = paths[:: 1 + len(paths) // _MANY_FILES]
    return sum(path.stat().st_size for path in asked) * len(paths) // max(1, len(asked))


def bytes_read() -> int:
    """Return the bytes that this process has read from files, if the system counts them."""
    words = _PROCESS_IO.read_text().split()
    return int(words[words.index("rchar:") + 1])
