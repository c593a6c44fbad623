# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what /proc knows of processes."""

from pathlib import Path


def all_pids() -> list[int]:
    """Of the process namespace that this one is in."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def is_alive(pid: int) -> bool:
    """Whether it runs, or stands still; what has ended and was not reaped does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def words_of(pid: int) -> str:
    """Its command line without names of folders; empty where it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return " ".join(Path(word).name for word in words)[:200].strip()
