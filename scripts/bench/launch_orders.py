# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every order in which devices may start the collectives of recorded steps: of Megatron with
tensor, interleaved pipeline, context and expert parallelism, and of the library, on 4 ranks; and
whether circles that are planted in them are found.

    python -m scripts.bench.launch_orders --layouts tensor --out runs/tensor.jsonl
    python -m scripts.report.add_record launch_orders runs/*.jsonl

With NCCL's implicit order the search is done again with every order, those that come to the same
too.
"""

import argparse
import time
from itertools import islice
from pathlib import Path

from scripts.launch_order.commands import HOST, Program, commands_of, num_waits
from scripts.launch_order.interleavings import Device, Found, search
from scripts.launch_order.planted import DEVICES, exchanges
from scripts.launch_order.recorded_steps import LAYOUTS, NUM_RECORDED, recorded
from scripts.report.launch_table import launch_table
from scripts.report.records import append
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.machine import machine_record

QUEUES, PLACES = (1, 2, 4, 8, 32), (1, 2, 4, 8)
NUM_PLANTED = 4  # of each layout
MANY = 10_000_000  # states: all of them are tried


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--max-states", type=int, default=100_000, help="of one device without the implicit order"
    )
    parser.add_argument(
        "--every-order",
        type=int,
        nargs="+",
        default=PLACES,
        metavar="PLACES",
        help="of the devices on which all orders are tried, those that come to the same too",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="take the recorded steps from there where they are, else keep them there",
    )
    parser.add_argument("--out", type=Path, help="append records to this file")
    args = parser.parse_args()
    lines: list[dict] = []
    for name in args.layouts:
        folder = args.traces / name if args.traces else None
        ranks = _kept(folder) if folder and folder.is_dir() else _recorded(name, folder)
        lines += measured(LAYOUTS[name].name, [commands_of(one) for one in ranks], args)
    print(launch_table(lines))
    if args.out:
        append(args.out, machine_record(), *lines)


def measured(layout: str, programs: list[Program], args: argparse.Namespace) -> list[dict]:
    """A line for the programs, one for each device and kind of search, one for what was planted."""
    line = {"kind": "program", "layout": layout, "ranks": len(programs), "steps": NUM_RECORDED}
    line["collectives"] = max(sum(bool(one.meetings) for one in each) for each in programs)
    line["waits"] = max(map(num_waits, programs))
    line["host_waits"] = max(sum(one.stream == HOST for one in each) for each in programs)
    lines: list[dict] = [line]
    for in_host_order in (True, False):
        for num_queues in QUEUES:
            for num_places in PLACES:
                device = Device(num_queues, num_places, in_host_order)
                tries_every = in_host_order and num_places in args.every_order
                for is_reduced in (True, False) if tries_every else (True,):
                    max_states = MANY if in_host_order else args.max_states
                    lines.append(_searched(layout, programs, device, is_reduced, max_states))
    planted = list(islice(exchanges(programs, seed=1), NUM_PLANTED))
    found = sum(all(search(one, device).circle for device in DEVICES) for one in planted)
    lines.append({"kind": "planted", "layout": layout, "planted": len(planted), "found": found})
    return lines


def _searched(
    layout: str, programs: list[Program], device: Device, is_reduced: bool, max_states: int
) -> dict:
    start = time.process_time()
    found: Found = search(programs, device, max_states, is_reduced)
    return {
        "kind": "search",
        "layout": layout,
        "in_host_order": device.in_host_order,
        "queues": device.num_queues,
        "places": device.num_places,
        "is_reduced": is_reduced,
        "states": found.num_states,
        "seconds": round(time.process_time() - start, 3),
        "is_all": found.is_all,
        "circle": bool(found.circle),
    }


def _kept(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("rank*.jsonl"))]


def _recorded(name: str, folder: Path | None) -> list[list[str]]:
    with DeviceWorlds() as worlds:
        ranks = recorded(worlds, LAYOUTS[name])
    if folder:
        folder.mkdir(parents=True)
        for rank, lines in enumerate(ranks):
            (folder / f"rank{rank:02}.jsonl").write_text("\n".join(lines) + "\n")
    return ranks


if __name__ == "__main__":
    main()
