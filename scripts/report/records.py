# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the files of docs/results/records: JSON lines of which those of kind "machine" say with
which command, when and on what the others were measured. Must not know what was measured.
"""

import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "records"
# Records that documents have places for and that are still to be made. What is made from them says
# so; a record that is neither here nor in FOLDER is a mistake.
PENDING = {
    "stock_noise",
    "compare fast",
    "checkpoints",
    "scaling",
    "pasa_training",
}
_LIBRARIES = ("torch", "megatron-core", "deepspeed")


class NotRecorded(FileNotFoundError):
    """There is no such record; `name` says which."""

    def __init__(self, name: str):
        super().__init__(f"there is no record {name}")
        self.name = name


class Record(NamedTuple):
    """One file: its machine lines, and what was measured."""

    machines: list[dict]
    lines: list[dict]


def machine_line(command: list[str] | None = None) -> dict:
    """The first line of a record. command: words to run it again with; those of this process."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "kind": "machine",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(command or ["python", *sys.argv]),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_lines(file: Path, lines: list[dict]) -> None:
    """Replace `file`, a line for each of `lines`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def read_record(name: str, folder: Path = FOLDER) -> Record:
    """The record NAME.jsonl. Raises NotRecorded."""
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        raise NotRecorded(name)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    machines = [line for line in lines if line.get("kind") == "machine"]
    return Record(machines, [line for line in lines if line.get("kind") != "machine"])
