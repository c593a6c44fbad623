# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a command to its end or to a time limit, ends all that it started, and keeps its output."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """How a command ended."""

    status: int | None
    seconds: float
    log: Path

    @property
    def lines(self) -> list[str]:
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    @property
    def own_lines(self) -> list[str]:
        """Those that the package printed as its last words."""
        return [line for line in self.lines if line.startswith("megatron_asynchzp: rank ")]

    def describe(self, limit_s: float) -> str:
        """For a command that did not do what it should: how it ended, and its last line."""
        last = f"; its last line: {self.lines[-1][:300]}" if self.lines else ""
        if self.status is None:
            return f"not finished after {limit_s:g} s{last}"
        how = f"status {self.status}" if self.status >= 0 else f"signal {-self.status}"
        return f"ended with {how}{last}"


def run_command(
    command: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> Ended:
    """Run `command` in the project's root. Nothing that it started runs on afterwards."""
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(timeout=max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_all(process)
    return Ended(status, time.monotonic() - start_s, log)


def _end_all(process: subprocess.Popen) -> None:
    """End `process` and all processes below it.

    torchrun and a command within a command start sessions of their own, which the signal to a
    process group does not reach.
    """
    below = _descendants(process.pid)
    for kill, target in [(os.killpg, process.pid), *((os.kill, pid) for pid in below)]:
        try:
            kill(target, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Processes that `pid`, which still runs, has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]
