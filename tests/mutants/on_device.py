# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the device path at every place, one at a time, and shows what notices on the emulated
device:

python -m tests.mutants.on_device                 all; ends with status 1 below 95 in 100 noticed
python -m tests.mutants.on_device --only TEXT     those whose line contains it
python -m tests.mutants.on_device --harmless      those that other orders are said to cover
python -m tests.mutants.on_device --write         and brings its record and page up to date
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import NamedTuple

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.mutants.device_faults import KINDS, Attempt, Fault, Result, results_of, train_with_each
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
# A program hangs where it takes so many times as long as without a fault; and some seconds, for
# machines that are busy.
_HANGS_AFTER, _AND_S = 10, 30.0
_RANKS, _AT_ONCE = 2, 20
_FAULTS = "tests.mutants.device_faults"


class Outcome(NamedTuple):
    """by: what noticed it, one of NOTICED_BY, "" for nothing; program, delays: in which run; line:
    its words."""

    fault: Fault
    by: str
    program: str = ""
    delays: Delays = AT_ONCE
    line: str = ""


class Run(NamedTuple):
    """A program, its place among PROGRAMS, and delays."""

    program: int
    delays: Delays


class Runner:
    """Tries faults, many in one world: what is found to end it is tried again as the first of the
    next one, and a world in which a program without a fault is disturbed afterwards counts for the
    first alone."""

    def __init__(self, worlds: DeviceWorlds, programs: Sequence[int] = range(len(PROGRAMS))):
        self._worlds, self._programs = worlds, programs
        start_s = time.monotonic()
        unharmed = [Attempt(None, program) for program in programs]
        results, failure = self._run(unharmed, AT_ONCE, 300.0, {})
        if failure:
            raise RuntimeError(f"without a fault: {failure}")
        for attempt, result in zip(unharmed, results):
            if result.told:
                raise RuntimeError(f"{PROGRAMS[attempt.program].name}: {result.told[0]}")
        self._unharmed = dict(zip(programs, results))
        # The world has started in that time, too.
        mean_s = (time.monotonic() - start_s) / len(programs)
        self._limit_s = _AND_S + _HANGS_AFTER * mean_s

    @property
    def faults(self) -> list[Fault]:
        """One at each place that a program passes, by kind."""
        places = {fault: None for one in self._unharmed.values() for fault in one.places}
        return sorted(places, key=lambda fault: (KINDS.index(fault.what), fault.place))

    def try_all(
        self, faults: Iterable[Fault], report: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """Each in every program that passes its place, until it is noticed; `report` is called as
        each is decided."""
        left = {fault: deque(self._runs_of(fault)) for fault in faults}
        outcomes: dict[Fault, Outcome] = dict.fromkeys(left, None)  # pyright: ignore[reportAssignmentType]
        while left:
            for fault, outcome in self._try(self._batch(left)).items():
                left[fault].popleft()
                if outcome.by or not left[fault]:
                    del left[fault]
                    outcomes[fault] = outcome
                    report(outcome)
        return list(outcomes.values())

    def _runs_of(self, fault: Fault) -> Iterator[Run]:
        passes = {
            program: self._unharmed[program].places.get(fault, 0) for program in self._programs
        }
        passing = sorted(filter(passes.get, passes), key=lambda program: -passes[program])
        yield from (Run(program, AT_ONCE) for program in passing)
        count = max(len(passing), len(PUT_OFF))
        yield from map(Run, islice(cycle(passing), count), cycle(PUT_OFF))

    @staticmethod
    def _batch(left: Mapping[Fault, Sequence[Run]]) -> dict[Fault, Run]:
        """The next run of the first fault, and of those that can be tried in the same world."""
        first = next(iter(left))
        same = (left[first][0].delays, first.environment)
        alike = ((one, runs[0]) for one, runs in left.items())
        chosen = ((one, run) for one, run in alike if (run.delays, one.environment) == same)
        return dict(islice(chosen, _AT_ONCE))

    def _try(self, batch: Mapping[Fault, Run]) -> dict[Fault, Outcome]:
        """Of the first of them, as far as the world lived."""
        first, run = next(iter(batch.items()))
        attempts = [Attempt(fault, run.program) for fault, run in batch.items()]
        is_alone = len(batch) == 1
        check = [] if is_alone else [Attempt(None, run.program)]
        results, failure = self._run(
            [*attempts, *check], run.delays, self._limit_s, first.environment
        )
        if not results:
            by, line = noticed_in(failure)
            return {first: Outcome(first, by, PROGRAMS[run.program].name, run.delays, line)}
        is_disturbed = len(results) >= len(batch) and bool(
            failure or (check and self._noticed(run.program, results[-1]))
        )
        if is_disturbed and not is_alone:
            return self._try({first: run})
        return {
            fault: self._judged(fault, one, result)
            for (fault, one), result in zip(batch.items(), results)
        }

    def _noticed(self, program: int, result: Result) -> str:
        if result.told:
            return WATCH
        return DIGITS if result.seen != self._unharmed[program].seen else ""

    def _judged(self, fault: Fault, run: Run, result: Result) -> Outcome:
        by = self._noticed(run.program, result)
        line = result.told[0] if result.told else ""
        return Outcome(fault, by, PROGRAMS[run.program].name, run.delays, line)

    def _run(
        self, attempts: Sequence[Attempt], delays: Delays, limit_s: float, env: dict[str, str]
    ) -> tuple[list[Result], str]:
        """What came of the first of them, as far as the world lived, and of what it died."""
        failure = ""
        with tempfile.TemporaryDirectory() as folder:
            given = attempts, delays, limit_s, folder
            most_s = limit_s * (1 + len(attempts))  # the ranks end themselves before
            try:
                self._worlds.run(train_with_each, _RANKS, *given, timeout_s=most_s, env=env)
            except DeviceFailure as error:
                failure = str(error)
            return results_of(len(attempts), _RANKS, folder), failure


_ENDED_BY_WATCH = ("nothing orders", "taken them back", "touches page-locked memory")


_END_OF_TIME = "Timeout ("  # a rank's last words when it ends itself


def noticed_in(text: str) -> tuple[str, str]:
    """Of a run that failed: what ended it, and its words."""
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"emulated device: |[\w.]+(Error|Mismatch|Failure):", line)
    ]
    # A peer of a rank that has ended fails too, and may be first.
    named.sort(key=lambda line: "OrderMismatch" not in line)
    late = [line for line in lines if line.startswith(_END_OF_TIME)]
    line = (named or late or lines)[0][:300]
    if "OrderMismatch" in line:
        return ORDER_CHECK, line
    if any(words in line for words in _ENDED_BY_WATCH):
        return WATCH, line
    return (HANG if line in late else ERROR), line


def run_faults(chosen: Callable[[Fault], bool], report: Callable[[Outcome], None]) -> list[Outcome]:
    """Try those that are chosen; `report` is called as each is decided."""
    with DeviceWorlds([_FAULTS]) as worlds:
        runner = Runner(worlds)
        return runner.try_all(filter(chosen, runner.faults), report)


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


def _text_of(what: str, place: str) -> str:
    return f"{what}: {place}"


def table_of(rows: Sequence[dict]) -> str:
    """The Markdown page of a record."""
    tried = [row for row in rows if "harmless" not in row]
    missed = [row for row in tried if not row["noticed_by"]]
    harmless = [row for row in rows if "harmless" in row]
    lines = [
        "# Faults of the device path\n",
        "What the engine asks of streams, events, memory and collectives is left out or done wrong "
        "at one place at a time, on two ranks of the "
        "[emulated device](../testbed.md#cuda-on-a-cpu). "
        "The places are found by running the programs of `tests/mutants/device_programs.py`. "
        "The record has each fault's place, program, law and seed, and what noticed it: the watch, "
        "digits that differ, the engine's comparison of orders, an error, or a run that does not "
        "end.\n",
        f"{max(row['date'] for row in rows)} · `{COMMAND}` · "
        f"{len(tried) - len(missed)} of {len(tried)} noticed · "
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
        f"Nothing goes wrong where {len(harmless)} more are broken. "
        "`tests/mutants/harmless_faults.py` says why of each, and they are not counted.",
    ]
    return "\n".join(lines) + "\n"


def write(outcomes: Sequence[Outcome], only: str = "") -> None:
    """Replace the record, of the faults that contain `only`, and its page."""
    old = RECORD.read_text().splitlines() if RECORD.is_file() else []
    kept = [
        row
        for row in map(json.loads, old)
        if "harmless" not in row and only not in _text_of(row["fault"], row["place"])
    ]
    rows = kept + rows_of(outcomes, datetime.now(UTC).date().isoformat())
    rows.sort(key=lambda row: ("harmless" in row, KINDS.index(row["fault"]), row["place"]))
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(table_of(rows))


def print_outcome(one: Outcome) -> None:
    found = f"{one.program} [{one.delays}] {one.line}" if one.by else ""
    print(f"{one.by or 'NOTHING':15} {_text_of(*one.fault)} {found}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.on_device", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that contain it")
    parser.add_argument("--harmless", action="store_true", help="those that are left out otherwise")
    parser.add_argument("--write", action="store_true", help="bring the record and page up to date")
    args = parser.parse_args()
    if args.write and args.harmless:
        parser.error("what is harmless has no outcome to write")

    def is_chosen(fault: Fault) -> bool:
        return (fault in HARMLESS) == args.harmless and args.only in _text_of(*fault)

    outcomes = run_faults(is_chosen, print_outcome)
    if args.write:
        write(outcomes, args.only)
    noticed = [one for one in outcomes if one.by]
    counts = dict(Counter(one.by for one in noticed))
    print(f"{len(noticed)} of {len(outcomes)} noticed: {counts}")
    if args.harmless:
        return int(bool(noticed))
    return int(len(noticed) < LEAST * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
