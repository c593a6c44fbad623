# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the processes of one run: starts them on their nodes and watches them until they end.

It works inside private namespaces, of which this process is the first (its children's orphans come
to it).
"""

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from scripts.faults import agents, program
from scripts.faults.cells import LAST_STEP, Cell
from scripts.faults.processes import all_pids, is_alive, words_of
from scripts.testbed.links import address
from scripts.testbed.ranks import RankPlace

_POLL_S = 0.01


class World:
    """The ranks of one run of the library's program, each forked from this process.

    folder: for their notes and logs. pids: by rank, as far as they are known; ended: exit status
    and time.monotonic() of those that have, by rank.
    """

    def __init__(self, cell: Cell, folder: Path):
        self.cell, self.folder = cell, folder
        self.pids: dict[int, int] = {}
        self.ended: dict[int, tuple[int, float]] = {}
        (folder / "notes").mkdir(parents=True, exist_ok=True)

    def start(self, checkpoints: Path, port: int, limit_s: float, moment: str = "") -> None:
        """moment: see moments.py."""
        cell = self.cell
        task = program.Task(cell.sizes, cell.schedule, limit_s, checkpoints, self.folder / "notes")
        for rank in range(cell.world_size):
            env = RankPlace(rank, cell.world_size, cell.ranks, port).environment()
            env |= self.variables(moment) | {"MASTER_ADDR": address(0)}
            self.pids[rank] = _fork(
                rank // cell.ranks, self.folder / f"{rank}.log", env, program.main, task
            )

    def variables(self, moment: str) -> dict[str, str]:
        """Of the environment of every process."""
        about = {"FAULT_FOLDER": str(self.folder), "GLOO_SOCKET_IFNAME": "eth0"}
        return about | ({"FAULT_MOMENT": moment} if moment else {})

    def has_ended(self) -> bool:
        """Return whether all processes have ended, and note those that have."""
        for pid, status in _reaped():
            for rank in [rank for rank, known in self.pids.items() if known == pid]:
                self.ended[rank] = status, time.monotonic()
        return len(self.ended) == self.cell.world_size

    def await_end(self, deadline: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether all processes ended, or `until` came true, before the deadline."""
        while not self.has_ended() and not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def signal(self, ranks: list[int], number: signal.Signals) -> None:
        for rank in ranks:
            if rank not in self.ended:
                os.kill(self.pids[rank], number)

    def take_power(self) -> None:
        """Kill all processes of the cell's node, whose link is down."""
        self.signal(self.cell.dead, signal.SIGKILL)

    def left(self) -> list[str]:
        """Return the command lines of the other processes in these namespaces."""
        own = os.getpid()
        found = {pid: words_of(pid) for pid in all_pids() if pid != own and is_alive(pid)}
        return [words for words in found.values() if words]

    def kill(self) -> None:
        """All that is left of it."""
        for pid in all_pids():
            if pid != os.getpid() and is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.await_end(time.monotonic() + 10)

    def text(self, rank: int) -> str:
        log = self.folder / f"{rank}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def is_done(self, rank: int) -> bool:
        notes = self.folder / "notes" / str(rank)
        return notes.exists() and notes.read_text().endswith("done\n")

    def final_loss(self) -> str | None:
        """That of the last step, with all its bits."""
        found = None
        for file in sorted((self.folder / "notes").iterdir()):
            for line in file.read_text().splitlines():
                if line.startswith(f"step {LAST_STEP} "):
                    found = line.split()[2]
        return found


class AgentWorld(World):
    """A world of Megatron's program, whose ranks torchrun's agents start, one agent a node."""

    def __init__(self, cell: Cell, folder: Path):
        super().__init__(cell, folder)
        self._agents: dict[int, int] = {}
        self._statuses: dict[int, tuple[int, float]] = {}

    def start(
        self, checkpoints: Path, port: int, limit_s: float, moment: str = "", more: str = ""
    ) -> None:
        env = self.variables(moment) | {"FAULT_LIMIT_S": str(limit_s), "OMP_NUM_THREADS": "1"}
        env |= {"FAULT_CHECKPOINTS": str(checkpoints)}
        words = agents.command_line(self.cell, checkpoints, more)
        for node in range(self.cell.nodes):
            log = self.folder / f"agent{node}.log"
            args = self.cell, node, port, words
            self._agents[node] = _fork(node, log, env, agents.run_agent, *args)

    def has_ended(self) -> bool:
        now = time.monotonic()
        for pid, status in _reaped():
            for node in [node for node, known in self._agents.items() if known == pid]:
                self._statuses[node] = status, now
        for rank in range(self.cell.world_size):
            file = self.folder / f"pid{rank}"
            if rank not in self.pids and file.exists() and (text := file.read_text()):
                self.pids[rank] = int(text)
            if rank in self.pids and rank not in self.ended and not is_alive(self.pids[rank]):
                self.ended[rank] = 0, now
        if len(self._statuses) < self.cell.nodes:
            return False
        for rank in range(self.cell.world_size):
            self.ended.setdefault(rank, (0, now))
        self.ended = {
            rank: (self._statuses[rank // self.cell.ranks][0], end)
            for rank, (_, end) in self.ended.items()
        }
        return True

    def take_power(self) -> None:
        os.kill(self._agents[self.cell.node], signal.SIGKILL)
        super().take_power()


def world_of(cell: Cell, folder: Path) -> World:
    """That of the cell's program."""
    return World(cell, folder) if cell.program == "library" else AgentWorld(cell, folder)


def _fork(node: int, log: Path, env: dict[str, str], main: Callable, *args: object) -> int:
    """The process id of a child on `node` that calls `main`, and prints to `log`."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        redirect(log)
        with open(f"/run/netns/node{node}") as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
        os.environ.update(env)
        main(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def redirect(log: Path) -> None:
    """What this process prints goes to `log`."""
    with open(log, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


def _reaped() -> list[tuple[int, int]]:
    """Children that have ended, with their statuses."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))
