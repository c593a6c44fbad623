# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs scripts through the launcher as torchrun would start them, one process per rank.

It keeps what each rank printed, and knows no script.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from scripts.testbed import ranks


class Ended(NamedTuple):
    """How one rank ended: its exit status (negative: a signal) and all that it printed."""

    status: int
    text: str

    @property
    def own_lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("megatron_asynchzp: ")]


def _run_main(argv: list[str], env: dict[str, str], log: str) -> None:
    """In a process forked from one that has imported Megatron: `python -m` without its imports."""
    with open(log, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(env)
    import torch

    from megatron_asynchzp import launch

    torch.set_num_threads(1)  # several ranks share two cores
    status: Any = 0
    try:
        launch.main(argv)
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Launch:
    """The running ranks of one start."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        line: str,
        world_size: int = 1,
        env: dict[str, str] | None = None,
        of_last: tuple[str, dict[str, str]] = ("", {}),
    ):
        """Start `script` with the arguments in `line`; the logs go to `folder`.

        of_last: further arguments and variables of the last rank alone.
        """
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
        shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        shared |= {"GLOO_SOCKET_IFNAME": "lo"} | (env or {})
        self._logs: list[Path] = []
        self.processes: list[BaseProcess] = []
        for rank in range(world_size):
            self._logs.append(folder / f"rank{rank}.log")
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            more, variables = of_last if rank == world_size - 1 else ("", {})
            words = [str(script), *line.split(), *more.split()]
            args = (words, own | variables, str(self._logs[-1]))
            self.processes.append(ranks.start_process(_run_main, *args))

    def await_text(self, words: str, timeout_s: float = 120.0) -> None:
        """Return when one of the ranks has printed `words`; raises where they all ended before."""
        deadline = time.monotonic() + timeout_s
        while not any(words in log.read_text() for log in self._logs if log.exists()):
            is_running = any(process.is_alive() for process in self.processes)
            if not is_running or time.monotonic() > deadline:
                raise AssertionError(f"nobody printed {words!r}: {self.end(0.0)}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send every rank a signal, as a terminal does."""
        for process in self.processes:
            os.kill(process.pid, number)  # pyright: ignore[reportArgumentType]

    def end(
        self, timeout_s: float = 240.0, is_awaited: Callable[[int], bool] = lambda rank: True
    ) -> list[Ended]:
        """Return how the ranks ended.

        A rank not awaited, or that runs after `timeout_s` seconds, is killed.
        """
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            if is_awaited(rank):
                process.join(timeout=max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        pairs = zip(self.processes, self._logs)
        return [Ended(process.exitcode or 0, log.read_text()) for process, log in pairs]


def launch(folder: Path, script: Path, line: str, world_size: int = 1) -> list[Ended]:
    """Run `script` through the launcher to its end, on `world_size` ranks."""
    return Launch(folder, script, line, world_size).end()


def processes_with(words: str) -> dict[int, str]:
    """Numbers and command lines of the processes that have `words` in their environment."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass  # it has ended, or is another user's
    return found
