# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the processes of a cell: starts its ranks on their nodes, lets the fault strike at its
moment, and keeps what became of each. Inside private namespaces, of which this process is the first
(its children's orphans come to it)."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.faults.cells import Cell
from scripts.faults.moments import REACHED, STRUCK
from scripts.faults.program import STEPS, Task, complete_checkpoints, run_as_rank
from scripts.faults.verdict import Ended, Outcome
from scripts.testbed.links import Links, address
from scripts.testbed.ranks import Place

_START_S = 60.0  # until a moment is reached, and for a run that nobody disturbs
_STOPPED_LONGER_S = 4.0
_ENDS_S = 25.0  # beyond the limit: more than a rank may take
_PART = 0.01  # of the rate of a link


@dataclass
class Ranks:
    """Forked ranks of one world. ended: status and time.monotonic() of those that have, by rank."""

    folder: Path
    pids: list[int] = field(default_factory=list)
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)

    def start(self, cell: Cell, task: Task, port: int, env: dict[str, str]) -> None:
        for rank in range(cell.world_size):
            place = Place(rank, cell.world_size, cell.ranks, port)
            own = place.environment() | {
                "MASTER_ADDR": address(0),
                "GLOO_SOCKET_IFNAME": "eth0",
                "FAULT_FOLDER": str(self.folder),
                **env,
            }
            if not (pid := os.fork()):
                namespace = f"/run/netns/node{rank // cell.ranks}"
                run_as_rank(task, own, namespace, self.folder / f"{rank}.log")
            self.pids.append(pid)

    def reap(self) -> bool:
        """Note who has ended; whether all have."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in self.pids:
                code = os.waitstatus_to_exitcode(status)
                self.ended[self.pids.index(pid)] = code, time.monotonic()
        return len(self.ended) == len(self.pids)

    def await_end(self, deadline: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether all ranks ended, or `until` came true, before the deadline."""
        while not self.reap() and not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def signal(self, ranks: list[int], number: signal.Signals) -> None:
        for rank in ranks:
            if rank not in self.ended:
                os.kill(self.pids[rank], number)

    def text(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")

    def is_done(self, rank: int) -> bool:
        notes = self.folder / "notes" / str(rank)
        return notes.exists() and notes.read_text().endswith("done\n")

    def final_loss(self) -> str | None:
        notes = self.folder / "notes" / "0"
        lines = notes.read_text().splitlines() if notes.exists() else []
        words = [line.split() for line in lines if line.startswith("step ")]
        return words[-1][2] if words and int(words[-1][1]) == STEPS else None


class Bench:
    """Runs cells one after another on the same nodes. place: a folder for their files."""

    def __init__(self, links: Links, place: Path, limit_s: float):
        self._links, self._place, self._limit_s = links, place, limit_s
        self._port = 29600

    def run(self, cell: Cell) -> Outcome:
        """One cell, and then the run that goes on from what it left."""
        expected, saved = self._undisturbed(cell)
        folder = self._folder("cell")
        checkpoints = folder / "checkpoints"
        if cell.moment == "load":
            shutil.copytree(saved, checkpoints)
        outcome = self._strike(cell, folder, checkpoints)
        steps = complete_checkpoints(checkpoints)
        outcome.checkpoint = steps[-1] if steps else None
        outcome.expected_loss = expected
        outcome.final_loss = self._finish(cell, checkpoints)
        shutil.rmtree(checkpoints, ignore_errors=True)
        return outcome

    def _undisturbed(self, cell: Cell) -> tuple[str, Path]:
        """The last loss of such a world, and a folder with its first checkpoint."""
        name = "-".join(map(str, ("undisturbed", cell.world_size, *cell.sizes)))
        folder = self._place / name
        file, checkpoints = folder / "loss", folder / "checkpoints"
        if not file.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            loss = self._finish(cell, checkpoints)
            if loss is None:
                raise RuntimeError(f"{name}: the undisturbed run failed")
            for step in complete_checkpoints(checkpoints)[1:]:
                shutil.rmtree(checkpoints / str(step))
            file.write_text(loss)
        return file.read_text(), checkpoints

    def _finish(self, cell: Cell, checkpoints: Path) -> str | None:
        """The last loss of a run that goes on from `checkpoints`, undisturbed."""
        ranks = Ranks(self._folder("whole"))
        ranks.start(cell, self._task(cell, checkpoints, ranks.folder, 30.0), self._next_port(), {})
        is_over = ranks.await_end(time.monotonic() + _START_S)
        self._kill(ranks)
        return ranks.final_loss() if is_over else None

    def _strike(self, cell: Cell, folder: Path, checkpoints: Path) -> Outcome:
        ranks = Ranks(folder)
        task = self._task(cell, checkpoints, folder, self._limit_s)
        env = {"FAULT_MOMENT": f"{cell.victim} {cell.moment} {cell.visit}"}
        ranks.start(cell, task, self._next_port(), env)
        reached = folder / REACHED
        ranks.await_end(time.monotonic() + _START_S, reached.exists)
        outcome = Outcome(cell, self._limit_s, [], is_reached=reached.exists())
        begins = [time.monotonic()] * cell.world_size
        if outcome.is_reached:
            begins = self._inject(cell, ranks)
            ranks.await_end(max(begins) + self._limit_s + _ENDS_S)
        for rank in range(cell.world_size):
            status, end = ranks.ended.get(rank, (None, time.monotonic()))
            ended = Ended(status, end - begins[rank], ranks.text(rank), ranks.is_done(rank))
            outcome.ended.append(ended)
        outcome.processes = self._others(ranks)
        self._kill(ranks)
        self._links.heal(cell.node)
        return outcome

    def _inject(self, cell: Cell, ranks: Ranks) -> list[float]:
        """Let the fault strike, and end where it does not last. Returns for each rank from when on
        it can speak."""
        links, node = self._links, cell.node
        if cell.fault == "link down":
            links.take_down(node)
        elif cell.fault == "upload lost":
            links.stop_upload(node)
        elif cell.fault == "download lost":
            links.stop_download(node)
        elif cell.fault == "link at 1%":
            rate, unit = links.inter[:-4], links.inter[-4:]
            links.slow_down(node, f"{float(rate) * _PART:g}{unit}")
        elif cell.fault == "rank killed":
            ranks.signal(cell.dead, signal.SIGKILL)
        elif cell.fault == "rank stopped":
            ranks.signal([cell.victim], signal.SIGSTOP)
        else:  # a node without power sends nothing, not even that its connections are closed
            links.take_down(node)
            ranks.signal(cell.dead, signal.SIGKILL)
        begins = [time.monotonic()] * cell.world_size
        (ranks.folder / STRUCK).touch()
        if cell.fault == "link at 1%":
            ranks.await_end(begins[0] + self._limit_s)
            links.heal(node)
        if cell.fault == "rank stopped":
            resumed = begins[0] + self._limit_s + _STOPPED_LONGER_S
            ranks.await_end(resumed)  # which it will not
            ranks.signal([cell.victim], signal.SIGCONT)
            begins[cell.victim] = time.monotonic()
        return begins

    def _task(self, cell: Cell, checkpoints: Path, folder: Path, limit_s: float) -> Task:
        notes = folder / "notes"
        notes.mkdir()
        checkpoints.mkdir(exist_ok=True)
        return Task(cell.sizes, cell.schedule, limit_s, checkpoints, notes)

    def _others(self, ranks: Ranks) -> list[str]:
        """Processes beside the ranks and this one."""
        known = {os.getpid(), *ranks.pids}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if int(folder.name) not in known and state != "Z":
                    found.append((folder / "cmdline").read_text().replace("\0", " ")[:200])
            except OSError:
                pass  # it has ended
        return found

    def _kill(self, ranks: Ranks) -> None:
        ranks.reap()
        ranks.signal(list(range(len(ranks.pids))), signal.SIGKILL)
        ranks.await_end(time.monotonic() + 10)

    def _folder(self, name: str) -> Path:
        for number in range(10**6):
            folder = self._place / f"{name}{number}"
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
        raise AssertionError

    def _next_port(self) -> int:
        self._port += 1
        return self._port
