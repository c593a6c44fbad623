# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written in the environment of one cell and loaded in that of another."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scripts.testbed.differences import worst_difference
from scripts.versions.cells import Cell
from scripts.versions.environments import FOLDER, ROOT, environment_of, python_of

_WORKER = "tests.support.moved_checkpoints"


class MoveFailed(Exception):
    """A process of a cell did not end well; the message is its last line."""


def moves(cells: Sequence[Cell], say: Callable[[str], None]) -> Iterator[dict]:
    """A line for every pair of cells, in both directions. Raises NoEnvironment and MoveFailed."""
    date = time.strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory() as folder:
        losses: dict[Cell, list[float]] = {}
        places = {cell: str(Path(folder) / cell.name) for cell in cells}
        for cell in cells:
            say(f"{cell.name} writes")
            losses[cell] = _run(cell, "write", places[cell])["losses"]
        for reader in cells:
            others = [cell for cell in cells if cell != reader]
            say(f"{reader.name} reads {len(others)} checkpoints")
            found = _run(reader, "read", *(places[cell] for cell in others))
            for writer in others:
                yield {
                    "kind": "move",
                    "written": writer._asdict(),
                    "loaded": reader._asdict(),
                    "date": date,
                    **_outcome(losses[writer], found[places[writer]]),
                }


def _outcome(expected: list[float], found: dict) -> dict:
    if "reason" in found:
        return found
    return found | {"loss_error": worst_difference(found.pop("losses"), expected)}


def _run(cell: Cell, *words: str) -> dict:
    command = [str(python_of(cell)), "-m", _WORKER, *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment_of(cell), capture_output=True, text=True
    )
    if ended.returncode:
        log = FOLDER / f"{cell.name}.move.log"
        log.write_text(ended.stdout + ended.stderr)
        raise MoveFailed(f"{cell.name}: {ended.stderr.strip().splitlines()[-1]} (see {log.name})")
    return json.loads(ended.stdout.splitlines()[-1])
