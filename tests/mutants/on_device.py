# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the device path at every place, one at a time, and shows what notices on the emulated
device:

python -m tests.mutants.on_device                 all; ends with status 1 below 95 in 100 noticed
python -m tests.mutants.on_device --only TEXT     those whose line contains it
python -m tests.mutants.on_device --harmless      those that other orders are said to cover
python -m tests.mutants.on_device --write         all, and replaces docs/results/device_faults.md
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import NamedTuple

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.mutants.device_faults import KINDS, Fault, Result, train_with
from tests.mutants.device_programs import PROGRAMS
from tests.mutants.harmless_faults import HARMLESS
from tests.mutants.run import ROOT

COMMAND = "python -m tests.mutants.on_device --write"
TABLE = ROOT / "docs" / "results" / "device_faults.md"
RECORD = ROOT / "docs" / "results" / "records" / "device_faults.jsonl"
LEAST = 0.95
WATCH, DIGITS, ORDER_CHECK, ERROR, HANG = NOTICED_BY = (
    "the watch",
    "digits",
    "the order check",
    "an error",
    "a hang",
)
# Without a delay the watch notices, whatever comes first; the others are for what it cannot watch.
AT_ONCE = Delays()
PUT_OFF = (Delays("on-demand", 1), Delays("uniform", 2), Delays("slow-rank", 3))
# A world that takes so many times as long as the unharmed one hangs; and some seconds, for machines
# that are busy with something else.
_HANGS_AFTER, _AND_S = 10, 10.0
_FAULTS = "tests.mutants.device_faults"


class Outcome(NamedTuple):
    """by: what noticed it, one of NOTICED_BY, "" for nothing; program, delays: in which run; line:
    its words."""

    fault: Fault
    by: str
    program: str = ""
    delays: Delays = AT_ONCE
    line: str = ""


class Unharmed(NamedTuple):
    """A program without a fault. limit_s: how long it may take with one."""

    index: int
    result: Result
    limit_s: float


class Runner:
    """Tries faults, each in a world of its own: what is broken does not reach the next one."""

    def __init__(self, worlds: DeviceWorlds, programs: Sequence[int] = range(len(PROGRAMS))):
        self._worlds = worlds
        # The first run of a process imports more than the others do.
        self._measured(programs[0])
        self._unharmed = [self._measured(index) for index in programs]

    def _measured(self, index: int) -> Unharmed:
        start_s = time.monotonic()
        result = self._run(None, index, AT_ONCE, 300.0)
        if result.told:
            raise RuntimeError(f"{PROGRAMS[index].name}, without a fault: {result.told[0]}")
        return Unharmed(index, result, _AND_S + _HANGS_AFTER * (time.monotonic() - start_s))

    def _run(self, fault: Fault | None, index: int, delays: Delays, limit_s: float) -> Result:
        """What the ranks were told together, and what rank 0 saw."""
        env = {} if fault is None else fault.environment
        first, *others = self._worlds.run(
            train_with, 2, fault, index, delays=delays, timeout_s=limit_s, env=env
        )
        return first._replace(told=[line for one in (first, *others) for line in one.told])

    @property
    def faults(self) -> list[Fault]:
        """One at each place that a program passes, by kind."""
        places = {fault: None for one in self._unharmed for fault in one.result.places}
        return sorted(places, key=lambda fault: (KINDS.index(fault.what), fault.place))

    def try_fault(self, fault: Fault) -> Outcome:
        """In every program that passes its place, until it is noticed."""
        outcome = Outcome(fault, "")
        for unharmed, delays in self._runs_of(fault):
            outcome = self._try(fault, unharmed, delays)
            if outcome.by:
                break
        return outcome

    def _runs_of(self, fault: Fault) -> Iterator[tuple[Unharmed, Delays]]:
        passing = [one for one in self._unharmed if fault in one.result.places]
        yield from ((one, AT_ONCE) for one in passing)
        count = max(len(passing), len(PUT_OFF))
        yield from islice(zip(cycle(passing), cycle(PUT_OFF)), count)

    def _try(self, fault: Fault, unharmed: Unharmed, delays: Delays) -> Outcome:
        name = PROGRAMS[unharmed.index].name
        try:
            result = self._run(fault, unharmed.index, delays, unharmed.limit_s)
        except DeviceFailure as failure:
            by, line = _read(str(failure))
            return Outcome(fault, by, name, delays, line)
        if result.told:
            return Outcome(fault, WATCH, name, delays, result.told[0])
        by = DIGITS if result.seen != unharmed.result.seen else ""
        return Outcome(fault, by, name, delays)


_ENDED_BY_WATCH = ("nothing orders", "taken them back", "touches page-locked memory")


def _read(text: str) -> tuple[str, str]:
    """Of a run that failed: what ended it, and its words."""
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"emulated device: |[\w.]+(Error|Mismatch|Failure):", line)
    ]
    line = (named or lines)[0][:300]
    if "OrderMismatch" in line:
        return ORDER_CHECK, line
    if any(words in line for words in _ENDED_BY_WATCH):
        return WATCH, line
    late = all("not finished after" in one for one in lines if not one.startswith("---"))
    return (HANG if late else ERROR), line


def run_faults(
    chosen: Callable[[Fault], bool],
    report: Callable[[Outcome], None] = lambda _: None,
    programs: Sequence[int] = range(len(PROGRAMS)),
) -> list[Outcome]:
    """Try those at the places of `programs` that are chosen."""
    outcomes: list[Outcome] = []
    with DeviceWorlds([_FAULTS]) as worlds:
        runner = Runner(worlds, programs)
        for fault in filter(chosen, runner.faults):
            outcomes.append(runner.try_fault(fault))
            report(outcomes[-1])
    return outcomes


# ---- the record


def rows_of(outcomes: Sequence[Outcome], date: str) -> list[dict]:
    """One JSON object for each fault, and for each that is left out, with the reason."""
    common = {"command": COMMAND, "date": date}
    tried = [
        common
        | {
            "fault": one.fault.what,
            "place": one.fault.place,
            "noticed_by": one.by,
            "program": one.program,
            "law": one.delays.law,
            "seed": one.delays.seed,
            "line": one.line,
        }
        for one in outcomes
    ]
    left_out = [
        common | {"fault": fault.what, "place": fault.place, "harmless": reason}
        for fault, reason in HARMLESS.items()
    ]
    return tried + left_out


def table_of(rows: Sequence[dict]) -> str:
    """The Markdown page of a record."""
    tried = [row for row in rows if "harmless" not in row]
    missed = [row for row in tried if not row["noticed_by"]]
    harmless = [row for row in rows if "harmless" in row]
    lines = [
        "# Faults of the device path\n",
        "What the engine asks of streams, events, memory and collectives is left out or done wrong "
        "at one place at a time, on two ranks of the [emulated device](../testbed.md#cuda-on-a-cpu). "
        "The places are found by running the programs of `tests/mutants/device_programs.py`. "
        "The record has each fault's place, program, law and seed, and what noticed it: the watch, "
        "digits that differ, the engine's comparison of orders, an error, or a run that does not "
        "end.\n",
        f"{rows[0]['date']} · `{COMMAND}` · {len(tried) - len(missed)} of {len(tried)} noticed · "
        "[record](records/device_faults.jsonl)\n",
        f"| fault | places | noticed by {' | '.join(NOTICED_BY)} | not noticed |",
        f"|---|---:|{'---:|' * len(NOTICED_BY)}---:|",
    ]
    for what in [*KINDS, "all"]:
        of_kind = [row for row in tried if what in (row["fault"], "all")]
        by = Counter(row["noticed_by"] for row in of_kind)
        cells = [what, len(of_kind), *(by[name] or "" for name in NOTICED_BY), by[""] or ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"## Not noticed ({len(missed)})", ""]
    lines += [f"- {row['fault']}: {row['place']}" for row in missed] or ["None."]
    lines += [
        "",
        f"## Left out ({len(harmless)})",
        "",
        "Nothing goes wrong where these are broken, and so they are not counted.",
        "",
    ]
    lines += [f"- {row['fault']}: {row['place']}. {row['harmless']}" for row in harmless]
    return "\n".join(lines) + "\n"


def write(outcomes: Sequence[Outcome]) -> None:
    """Replace the record and its page."""
    rows = rows_of(outcomes, datetime.now(UTC).date().isoformat())
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(table_of(rows))


def print_outcome(one: Outcome) -> None:
    found = f"{one.program} [{one.delays}] {one.line}" if one.by else ""
    print(f"{one.by or 'NOTHING':15} {one.fault.what}: {one.fault.place} {found}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.on_device", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that contain it")
    parser.add_argument("--harmless", action="store_true", help="those that are left out otherwise")
    parser.add_argument("--write", action="store_true", help="replace the record and its page")
    args = parser.parse_args()
    if args.write and (args.only or args.harmless):
        parser.error("--write is for all faults")

    def is_chosen(fault: Fault) -> bool:
        is_harmless = fault in HARMLESS
        return is_harmless == args.harmless and args.only in f"{fault.what}: {fault.place}"

    outcomes = run_faults(is_chosen, print_outcome)
    if args.write:
        write(outcomes)
    noticed = [one for one in outcomes if one.by]
    counts = dict(Counter(one.by for one in noticed))
    print(f"{len(noticed)} of {len(outcomes)} noticed: {counts}")
    if args.harmless:
        return int(bool(noticed))
    return int(len(noticed) < LEAST * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
