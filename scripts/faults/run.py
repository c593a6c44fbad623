# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the course of a cell: a run with its fault, and a run that resumes after it."""

import shutil
import signal
import time
from itertools import count
from pathlib import Path

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint
from scripts.faults.cells import SAVE_EVERY, Cell
from scripts.faults.moments import REACHED, STRUCK
from scripts.faults.program import complete_checkpoints
from scripts.faults.verdict import Ended, Outcome, ran_on
from scripts.faults.worlds import World, world_of
from scripts.testbed.links import Links

_START_S = 90.0  # until a moment is reached, and for an undisturbed run
_AMPLE_LIMIT_S = 60.0
_STOPPED_LONGER_S = 5.0
_ENDS_S = 25.0  # beyond the limit: more than a rank may take
_PART = 0.01  # of the rate of a link


class Bench:
    """Runs cells one after another on the same nodes.

    place: a folder for their files; what is left there of other runs is used. limit_s: of a
    collective.
    """

    def __init__(self, links: Links, place: Path, limit_s: float):
        self._links, self._place, self._limit_s = links, place, limit_s
        self._ports, self._numbers = count(29600), count()

    def run(self, cell: Cell) -> Outcome:
        """One cell."""
        expected, saved = self._undisturbed(cell)
        folder = self._new_folder()
        checkpoints = folder / "checkpoints"
        if cell.moment == "load":
            shutil.copytree(saved, checkpoints)
        checkpoints.mkdir(exist_ok=True)
        outcome = self._strike(cell, folder, checkpoints)
        outcome.checkpoint = _newest(cell, checkpoints)
        outcome.expected_loss = expected
        if not ran_on(outcome):
            outcome.final_loss = self._finish(cell, checkpoints)
        shutil.rmtree(checkpoints)
        return outcome

    def _undisturbed(self, cell: Cell) -> tuple[str, Path]:
        """The last loss of such a world, and a folder with its first checkpoint alone."""
        about = "undisturbed", cell.program, cell.world_size, *cell.sizes
        folder = self._place / "-".join(map(str, about))
        file, checkpoints = folder / "loss", folder / "checkpoints"
        if file.exists():
            return file.read_text(), checkpoints
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints.mkdir(parents=True)
        whole = self._new_folder() / "checkpoints"
        whole.mkdir()
        loss = self._finish(cell, whole)
        if cell.program == "library" and loss is not None:
            shutil.copytree(whole / str(SAVE_EVERY), checkpoints / str(SAVE_EVERY))
        elif loss is not None:
            self._finish(cell, checkpoints, more=f"--exit-interval {SAVE_EVERY}")
        if loss is None or _newest(cell, checkpoints) is None:
            raise RuntimeError(f"{folder.name}: the undisturbed run failed; see {self._place}")
        file.write_text(loss)
        return loss, checkpoints

    def _finish(self, cell: Cell, checkpoints: Path, **options: str) -> str | None:
        """The last loss of a run that goes on from `checkpoints`, undisturbed."""
        world = world_of(cell, self._new_folder())
        world.start(checkpoints, next(self._ports), _AMPLE_LIMIT_S, **options)
        is_over = world.await_end(time.monotonic() + _START_S)
        world.kill()
        return world.final_loss() if is_over else None

    def _strike(self, cell: Cell, folder: Path, checkpoints: Path) -> Outcome:
        world = world_of(cell, folder)
        moment = f"{cell.victim} {cell.moment} {cell.visit}"
        world.start(checkpoints, next(self._ports), self._limit_s, moment)
        reached = folder / REACHED
        world.await_end(time.monotonic() + _START_S, reached.exists)
        outcome = Outcome(cell, self._limit_s, [], is_reached=reached.exists())
        begins = [time.monotonic()] * cell.world_size
        if outcome.is_reached:
            begins = self._inject(cell, world)
            world.await_end(max(begins) + self._limit_s + _ENDS_S)
        for rank in range(cell.world_size):
            status, end = world.ended.get(rank, (None, time.monotonic()))
            ended = Ended(status, end - begins[rank], world.text(rank), world.is_done(rank))
            outcome.ended.append(ended)
        outcome.over_after_s = time.monotonic() - max(begins)
        outcome.processes, outcome.final_loss = world.left(), world.final_loss()
        world.kill()
        self._links.heal(cell.node)
        return outcome

    def _inject(self, cell: Cell, world: World) -> list[float]:
        """Let the fault strike, and end it where it does not last."""
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
            world.signal(cell.dead, signal.SIGKILL)
        elif cell.fault == "rank stopped":
            world.signal([cell.victim], signal.SIGSTOP)
        else:  # a node without power sends nothing, not even that its connections are closed
            links.take_down(node)
            world.take_power()
        begins = [time.monotonic()] * cell.world_size
        (world.folder / STRUCK).touch()
        if cell.fault == "link at 1%":
            world.await_end(begins[0] + self._limit_s)
            links.heal(node)
        if cell.fault == "rank stopped":
            world.await_end(begins[0] + self._limit_s + _STOPPED_LONGER_S)  # which it will not
            world.signal([cell.victim], signal.SIGCONT)
            begins[cell.victim] = time.monotonic()
        return begins

    def _new_folder(self) -> Path:
        while (folder := self._place / f"run{next(self._numbers)}").exists():
            pass
        folder.mkdir(parents=True)
        return folder


def _newest(cell: Cell, checkpoints: Path) -> int | None:
    """The step of the newest checkpoint that is complete."""
    if cell.program == "library":
        return next(reversed(complete_checkpoints(checkpoints)), None)
    choice = choose_checkpoint(checkpoints)
    return choice and choice.iteration
