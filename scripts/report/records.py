# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns files of records, one JSON object a line.

Lines of kind "machine" hold the command, the date and the machine of the other lines.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Tables and pictures are made from the records of this folder.
FOLDER = Path(__file__).parents[2] / "docs" / "results" / "records"
# The records that documents have places for. A place of one that has not been made yet shows that.
EXPECTED = {
    *("census", "checkpoints", "clusters", "compare", "compare unlimited", "host_cost"),
    *("mutants", "generated_mutants", "parity", "early_update", "early_timeline"),
    *("pasa_accuracy", "pasa_kernels", "pasa_training", "peaks", "planner_published"),
    *("planner_testbed", "scale", "offload", "graph_host_cost", "overlap", "sub_samples"),
    *("device_schedules", "device_faults", "versions", "quickstart", "schedules", "stock_noise"),
    *("timeline", "grad_wire", "shrunk_models", "muon", "compare_pipelines", "weight_deltas"),
    *("launch_orders", "bit_flips", "faults", "restarts", "long_run", "recipes", "long_training"),
    "megatron_faults",
}


class RecordsError(ValueError):
    """Records that do not belong together; the message is one line for the user."""


class NotRecorded(FileNotFoundError):
    """There is no record `name`."""

    def __init__(self, name: str):
        super().__init__(f"there is no record {name}")
        self.name = name


class Record(NamedTuple):
    """One file of FOLDER: its machine lines, and what was measured."""

    machines: list[dict]
    lines: list[dict]


def read(files: Iterable[Path]) -> list[dict]:
    """All lines of all files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def read_record(name: str, folder: Path = FOLDER) -> Record:
    """The record NAME.jsonl. Raises NotRecorded."""
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        raise NotRecorded(name)
    return split(read([file]))


def split(lines: Iterable[dict]) -> Record:
    """Machine lines apart from the others."""
    record = Record([], [])
    for line in lines:
        (record.machines if line.get("kind") == "machine" else record.lines).append(line)
    return record


def append(file: Path, *records: dict) -> None:
    """Add records to a file, which is made with its folder where it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def replace(file: Path, records: Iterable[dict]) -> None:
    """As `append`, in place of what the file had; an interruption leaves one of the two whole."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    append(new, *records)
    new.replace(file)


def markdown_table(head: list[str], rows: Iterable[list[str]], num_left: int = 1) -> str:
    """A table whose columns are aligned to the right, all but the first `num_left`."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, "|" + "---|" * num_left + "---:|" * (len(head) - num_left))
    return "\n".join(lines) + "\n"


def existing_file(text: str) -> Path:
    """A type of arguments."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text)
