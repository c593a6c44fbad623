# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Looks for a circle in what a run launched on NCCL: one file per rank, in the order of the ranks,
each written after the same step. A file is a dump of torch's flight recorder:

    TORCH_FR_BUFFER_SIZE=100000 torchrun ...   # each rank writes to a file:
    torch._C._distributed_c10d._dump_nccl_trace()
    python -m scripts.launch_order rank*.pickle --queues 1 32 --places 1 4

or, with all that streams and the host wait for, what the emulated device has recorded:

    python -m scripts.testbed.device --ranks 4 --commands FOLDER -- SCRIPT ...
    python -m scripts.launch_order FOLDER/rank*.jsonl --queues 1 32 --places 1 4

Exit status: 0 without a circle, 1 with one, 2 for files that cannot be searched, 3 where no circle
was found but --max-states ended a search.
"""

import argparse
import pickle
import sys
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError
from scripts.launch_order.commands import Command, commands_of, launched, num_waits
from scripts.launch_order.interleavings import Device, search
from scripts.launch_order.record import launches_in, unmet_of

_PICKLE = b"\x80"  # how each begins


def read(paths: list[Path]) -> list[list[Command]]:
    """Raises ConfigurationError for what is none of them, and where they do not fit together."""
    programs = [_read_one(path) for path in paths]
    meetings = [[one for command in program for one in command.meetings] for program in programs]
    for path, met in zip(paths, meetings, strict=True):
        if not met:
            raise ConfigurationError(f"{path}: it has no collectives and no messages to look at")
    if unmet := unmet_of(meetings):
        raise ConfigurationError(
            f"{unmet[0]} is not in the files of all its ranks, nor are {len(unmet) - 1} others; "
            "give the files of all ranks, in their order, each written after the same step"
        )
    return programs


def _read_one(path: Path) -> list[Command]:
    try:
        text = path.read_bytes()
        if not text.startswith(_PICKLE):
            return commands_of(text.decode().splitlines())
        dump = pickle.loads(text)
        entries, program = dump["entries"], launched(launches_in(dump))
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: no dump of torch's flight recorder for NCCL and no commands of an emulated "
            f"device ({type(error).__name__})"
        ) from error
    if entries and entries[0]["record_id"]:
        raise ConfigurationError(
            f"{path}: the first {entries[0]['record_id']} launches are lost; run with a larger "
            "TORCH_FR_BUFFER_SIZE"
        )
    return program


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.launch_order", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--queues", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--places", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--max-states", type=int, default=1_000_000)
    asked = parser.parse_args(argv)
    try:
        programs = read(asked.files)
    except ConfigurationError as error:
        print(f"launch_order: {error}", file=sys.stderr)
        return 2
    if not any(map(num_waits, programs)):
        print(
            "No waits are known: these are more orders than a device has, and a circle may be none."
        )
    has_circle, is_all = False, True
    for in_host_order in (True, False):
        print(f"NCCL_LAUNCH_ORDER_IMPLICIT={int(in_host_order)}")
        for num_queues in asked.queues:
            for num_places in asked.places:
                device = Device(num_queues, num_places, in_host_order)
                found = search(programs, device, asked.max_states)
                outcome = "a circle" if found.circle else "no circle"
                if not found.circle and not found.is_all:
                    outcome += " so far"
                of = f"{num_queues} queues, {num_places} places"
                print(f"  {of}: {outcome}, {found.num_states:,} states", flush=True)
                for line in found.circle:
                    print(f"      {line}")
                has_circle |= bool(found.circle)
                is_all &= bool(found.circle) or found.is_all
    if has_circle:
        return 1
    return 0 if is_all else 3


if __name__ == "__main__":
    sys.exit(main())
