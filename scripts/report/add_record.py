# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a record of docs/results/records of what benchmarks have written with --out: with the
command and date of each run, and without names of folders of this machine.

    python -m scripts.report.add_record schedules runs/schedules.jsonl
    python -m scripts.report.add_record compare runs/A/records.jsonl runs/B/records.jsonl

The record is replaced. `python -m scripts.report.rebuild` then writes what is made
from it: tables, figures and pictures.
"""

import argparse
import re
import sys
import time
from pathlib import Path

from scripts.report.records import EXPECTED, FOLDER, existing_file, read, replace, split

_OUT = re.compile(r"(--out|--output|--traces|--directory) \S+")
_LIBRARIES = ("torch", "megatron-core")
_DROPPED = ("command", "machine", "cpus", "python", "load_before", *_LIBRARIES)


def added(file: Path) -> list[dict]:
    """The lines of one file, commands without folders. A benchmark that repeats its command and its
    machine in every line gets one machine line for each command instead."""
    lines = read([file])
    date = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
    machines = {line["command"]: _machine(line, date) for line in lines if "command" in line}
    return [
        *machines.values(),
        *({key: line[key] for key in line if key not in _DROPPED} for line in split(lines).lines),
    ]


def _machine(line: dict, date: str) -> dict:
    command = _OUT.sub(r"\1 FILE", line["command"])
    if line.get("kind") == "machine":
        return line | {"command": command}
    versions = {name: line[name].split("+")[0] for name in _LIBRARIES if name in line}
    place = {key: line[key] for key in ("machine", "cpus", "python")}
    return {"kind": "machine", "date": date, "command": command} | place | {"versions": versions}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=sorted(EXPECTED - {"compare unlimited"}))
    parser.add_argument("files", nargs="+", type=existing_file)
    args = parser.parse_args(argv)
    machines, measured = split(line for file in args.files for line in added(file))
    replace(FOLDER / f"{args.name}.jsonl", [*machines, *measured])


if __name__ == "__main__":
    main(sys.argv[1:])
