# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs cells of the table of faults and writes what was seen.

    python -m scripts.faults --seed 1 --repeats 4 --seconds 270 --out faults.jsonl

Every fault at every moment, `--repeats` times, of random worlds, ranks and visits: cell by cell
until `--seconds` are over. A call with the files of the calls before as `--done` goes on from
there. Ends with status 1 where a cell was not good. Needs root or user namespaces, and iproute2.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from scripts.testbed.links import Links, unavailable, unshare

_INSIDE = "ASYNCHZP_FAULTS_INSIDE"
_MOST_NODES = 4
PROGRAMS = ("library", "megatron")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="of the cells to do, leave out these")
    parser.add_argument("--stride", type=int, default=1, help="every so manieth from there on")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="records with cells")
    parser.add_argument("--cells", type=int, help="at most so many")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after these")
    parser.add_argument("--program", choices=PROGRAMS, default="library")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds of a collective")
    parser.add_argument("--inter", default="200mbit", help="rate of each node's link")
    parser.add_argument("--keep", type=Path, help="folder for logs; default: a temporary one")
    parser.add_argument("--out", type=Path, required=True, help="file of records, appended to")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    if not os.environ.get(_INSIDE):
        if (reason := unavailable()) is not None:
            sys.exit(f"faults: {reason}")
        inside = [*unshare(), sys.executable, "-m", __spec__.parent, *sys.argv[1:]]
        os.execvpe(inside[0], inside, os.environ | {_INSIDE: "1"})
    start_s = time.monotonic()
    from scripts.faults.cells import draw_cells
    from scripts.faults.run import Bench
    from scripts.report.records import append, read
    from scripts.testbed.machine import machine_record

    bad = 0
    links = Links(_MOST_NODES, args.inter)
    append(args.out, machine_record())
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(links, args.keep or Path(temporary), args.limit)
        cells = list(draw_cells(args.seed, args.repeats, args.program))
        done = {line.get("index") for line in read(filter(Path.exists, args.done))}
        left = [index for index in range(len(cells)) if index not in done]
        for index in left[args.first :: args.stride][: args.cells]:
            if time.monotonic() - start_s > args.seconds:
                print(f"faults: the next cell is {index}", flush=True)
                break
            outcome = bench.run(cells[index])
            about = outcome.as_dict()
            bad += bool(about["faults"])
            append(args.out, {"kind": "cell", "index": index, **about})
            named = f"{sum(about['names'].values())}/{len(about['names'])}"
            one = cells[index]
            end = max(ended.after_s for ended in outcome.ended)
            print(
                f"{index} {one.fault} | {one.moment} {one.visit} | {one.nodes}x{one.ranks} "
                f"{one.sizes} {one.schedule} victim {one.victim} | {end:.1f} s, named {named} | "
                f"{'; '.join(about['faults']) or 'good'}",
                flush=True,
            )
        else:
            print("faults: all cells have run", flush=True)
    if bad:
        sys.exit(f"faults: {bad} of the cells were not good")


if __name__ == "__main__":
    main()
