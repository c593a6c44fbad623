# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a table, or draws a picture, of records that a benchmark wrote.

python -m scripts.report schedules runs/schedules.jsonl
python -m scripts.report compare_front.png runs/compare/records.jsonl --output front.png
"""

import argparse
import sys
from pathlib import Path

from scripts.report.published import PICTURES, TABLES
from scripts.report.records import RecordsError, existing_file, read, split


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description=(__doc__ or "").split("\n\n")[0]
    )
    drawn = [name for name, picture in PICTURES.items() if picture.draw and picture.record]
    parser.add_argument("name", choices=[*TABLES, *drawn], metavar="NAME", help="see published.py")
    parser.add_argument("files", nargs="+", type=existing_file, metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="PNG", help="the picture")
    args = parser.parse_args(argv)
    if (args.output is None) == (args.name in PICTURES):
        parser.error("--output PNG goes with the name of a picture, and with no other")
    record = split(read(args.files))
    try:
        if args.name in TABLES:
            print(TABLES[args.name].markdown(record.lines))
        else:
            PICTURES[args.name].draw(record, args.output)  # pyright: ignore[reportOptionalCall]
    except RecordsError as error:
        sys.exit(f"{args.name}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
