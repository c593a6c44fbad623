# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the device path at every place, one at a time, and shows what notices on the emulated
device:

python -m tests.mutants.on_device                 all; ends with status 1 where one is not noticed
python -m tests.mutants.on_device --only TEXT     those whose line contains it
python -m tests.mutants.on_device --write         all, and replaces docs/results/device_mutants.md
                                                  and its record
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.mutants.device_faults import Fault, train_with
from tests.mutants.run import ROOT

COMMAND = "python -m tests.mutants.on_device --write"
TABLE = ROOT / "docs" / "results" / "device_mutants.md"
RECORD = ROOT / "docs" / "results" / "records" / "device_mutants.jsonl"
WATCH = "the watch"
# Without a delay the watch alone notices; the others are for what it does not.
LAWS = (Delays(), Delays("on-demand", 1), Delays("uniform", 2), Delays("slow-rank", 3))
_LONGEST_S = 120.0

EXPLAINED: dict[tuple[str, str], str] = {}
"""Why nothing can notice a fault: by what it is, and a part of its place."""

_INTRODUCTION = """# Faults of the device path, noticed

Each row is one place at which the engine orders streams, records an event, waits, launches, or
takes or reuses memory. There it is left out or done wrong, on every pass, while the engine trains
on the emulated device ([test-bed](../testbed.md#cuda-on-a-cpu)). A run notes the places, so no row
names a line of the code.
"""


class Outcome(NamedTuple):
    """by: what noticed it, "" for nothing; delays: under which; line: its words."""

    fault: Fault
    by: str
    delays: str
    line: str
    seconds: float


def find_faults(worlds: DeviceWorlds) -> tuple[object, list[Fault]]:
    """What the program sees unharmed, and every fault that it can have."""
    seen, places = worlds.run(train_with, 2, None, timeout_s=_LONGEST_S)[0]
    return seen, list(places)


def try_fault(worlds: DeviceWorlds, fault: Fault, expected: object) -> Outcome:
    start = time.monotonic()

    def outcome(by: str, delays: Delays, line: str = "") -> Outcome:
        return Outcome(fault, by, str(delays), line, time.monotonic() - start)

    for delays in LAWS:
        try:
            ranks = worlds.run(train_with, 2, fault, delays=delays, timeout_s=_LONGEST_S)
        except DeviceFailure as failure:
            return outcome(*_what_noticed(str(failure), delays))
        if not all(places.get(fault) for _, places in ranks):
            raise RuntimeError(f"{fault} was not reached")
        if any(seen != expected for seen, _ in ranks):
            return outcome("digits", delays)
    return outcome("", LAWS[-1])


def _what_noticed(text: str, delays: Delays) -> tuple[str, Delays, str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if own := [line for line in lines if "nothing orders" in line or "page-locked" in line]:
        return WATCH, delays, own[0].removeprefix("emulated device: ")
    named = ("OrderMismatch", "CollectiveFailure", "Error", "ranks differ", "time")
    found = [line for line in lines[1:] if any(name in line for name in named)]
    return "an error", delays, (found or lines)[-1][:300]


def explain(row: dict) -> str:
    """Why nothing notices the fault of this row; "" where nobody knows."""
    texts = [
        text
        for (fault, place), text in EXPLAINED.items()
        if fault == row["fault"] and place in row["place"]
    ]
    return texts[0] if texts else ""


def run_faults(only: str = "") -> list[Outcome]:
    outcomes = []
    with DeviceWorlds(preload=["tests.mutants.device_faults"]) as worlds:
        expected, faults = find_faults(worlds)
        for fault in faults:
            if only in f"{fault.what}: {fault.place}":
                outcomes.append(try_fault(worlds, fault, expected))
                _report(outcomes[-1])
    return outcomes


def _report(one: Outcome) -> None:
    print(
        f"{one.by or 'NOTHING':12} {one.fault.what}: {one.fault.place} [{one.delays}] {one.line}",
        flush=True,
    )


def rows_of(outcomes: Sequence[Outcome], date: str) -> list[dict]:
    return [
        {
            "command": COMMAND,
            "date": date,
            "fault": one.fault.what,
            "place": one.fault.place,
            "noticed_by": one.by,
            "delays": one.delays,
            "line": one.line,
            "seconds": round(one.seconds, 1),
        }
        for one in outcomes
    ]


def table_of(rows: Sequence[dict]) -> str:
    noticed = sum(bool(row["noticed_by"]) for row in rows)
    by_watch = sum(row["noticed_by"] == WATCH for row in rows)
    lines = [
        _INTRODUCTION,
        f"{rows[0]['date']} · `{COMMAND}` · {noticed} of {len(rows)} noticed, {by_watch} by the "
        "watch · [record](records/device_mutants.jsonl)\n",
        "| fault | place | noticed by | under |",
        "|---|---|---|---|",
    ]
    for row in rows:
        by = row["noticed_by"] or f"nothing: {explain(row)}"
        lines.append(f"| {row['fault']} | `{row['place']}` | {by} | {row['delays']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.on_device", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that contain it")
    parser.add_argument("--write", action="store_true", help="bring page and record up to date")
    args = parser.parse_args()
    outcomes = run_faults(args.only)
    if args.write and not args.only:
        rows = rows_of(outcomes, datetime.now(UTC).date().isoformat())
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
        TABLE.write_text(table_of(rows))
    counts = Counter(one.by or "nothing" for one in outcomes)
    print(f"{len(outcomes) - counts['nothing']} of {len(outcomes)} noticed: {dict(counts)}")
    return int(counts["nothing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
