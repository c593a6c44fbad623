# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a record of docs/results/records of the files that benchmarks wrote with --out.

    python -m scripts.report.add_record schedules runs/schedules.jsonl
    python -m scripts.report.add_record compare runs/A/records.jsonl runs/B/records.jsonl

The record is replaced. `python -m scripts.report.rebuild` then writes what is made
from it: tables, figures and pictures.
"""

import argparse
import re
import sys
from pathlib import Path

from scripts.report.records import EXPECTED, FOLDER, Record, existing_file, read, replace, split

_OUT = re.compile(r"(--out|--output|--traces|--directory) \S+")


def added(file: Path) -> Record:
    """What one file holds, commands without folders."""
    record = split(read([file]))
    machines = [
        line | {"command": _OUT.sub(r"\1 FILE", line["command"])} for line in record.machines
    ]
    return Record(machines, record.lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", choices=sorted(EXPECTED - {"compare unlimited"}))
    parser.add_argument("files", nargs="+", type=existing_file)
    args = parser.parse_args(argv)
    records = [added(file) for file in args.files]
    machines = [line for record in records for line in record.machines]
    measured = [line for record in records for line in record.lines]
    replace(FOLDER / f"{args.name}.jsonl", [*machines, *measured])


if __name__ == "__main__":
    main(sys.argv[1:])
