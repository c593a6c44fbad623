# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the device path at every place, one at a time, and shows what notices on the emulated
device:

python -m tests.mutants.on_device                 all; ends with status 1 where one is not noticed
python -m tests.mutants.on_device --only TEXT     those whose line contains it
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.mutants.device_faults import Fault, Result, train_with_each

WATCH = "the watch"
# Without a delay the watch alone notices; the others are for what it does not.
LAWS = (Delays(), Delays("on-demand", 1), Delays("uniform", 2), Delays("slow-rank", 3))
_AT_ONCE = 20  # faults of one world
_FAULTS = "tests.mutants.device_faults"


class Outcome(NamedTuple):
    """by: what noticed it, "" for nothing; delays: under which; line: its words."""

    fault: Fault
    by: str
    delays: str
    line: str = ""


class Runner:
    """Tries faults, as many as it can in one world: a fault that ends it needs another."""

    def __init__(self, worlds: DeviceWorlds, progress: Path):
        self._worlds, self._progress = worlds, progress
        [unharmed] = self._run([None], Delays())
        assert not unharmed.told, unharmed.told
        self._expected, self.faults = unharmed.seen, list(unharmed.places)

    def _run(self, faults: Sequence[Fault | None], delays: Delays) -> list[Result]:
        """What the ranks were told together, and what rank 0 saw."""
        self._progress.write_text("0")
        limit_s = 60.0 + 10 * len(faults)
        ranks = self._worlds.run(
            train_with_each, 2, faults, str(self._progress), delays=delays, timeout_s=limit_s
        )
        return [first._replace(told=first.told + other.told) for first, other in zip(*ranks)]

    def try_all(self, faults: Sequence[Fault], report: Callable[[Outcome], None]) -> None:
        """Calls `report` as each is decided."""
        left = list(faults)
        for delays in LAWS:
            missed: list[Fault] = []
            while left:
                batch = left[:_AT_ONCE]
                for fault, outcome in zip(batch, self._try(batch, delays)):
                    left.remove(fault)
                    if outcome.by or delays == LAWS[-1]:
                        report(outcome)
                    else:
                        missed.append(fault)
            left = missed

    def _try(self, faults: Sequence[Fault], delays: Delays) -> list[Outcome]:
        """Of the first of them, as far as the world lived."""
        try:
            results = self._run(faults, delays)
        except DeviceFailure as failure:
            fault = faults[ended := int(self._progress.read_text())]
            if ended:  # those before it may have done it
                return self._try(faults[:ended], delays)
            return [Outcome(fault, "an error", str(delays), _reason(str(failure)))]
        return [self._judged(fault, one, delays) for fault, one in zip(faults, results)]

    def _judged(self, fault: Fault, result: Result, delays: Delays) -> Outcome:
        if not result.places.get(fault):
            raise RuntimeError(f"{fault} was not reached")
        if result.told:
            return Outcome(fault, WATCH, str(delays), result.told[0])
        by = "digits" if result.seen != self._expected else ""
        return Outcome(fault, by, str(delays))


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"emulated device: |[\w.]+(Error|Mismatch|Failure):", line)
    ]
    return (named or lines)[0][:300]


def run_faults(only: str = "") -> list[Outcome]:
    outcomes: list[Outcome] = []

    def report(one: Outcome) -> None:
        outcomes.append(one)
        by = one.by or "NOTHING"
        print(f"{by:9} {one.fault.what}: {one.fault.place} [{one.delays}] {one.line}", flush=True)

    with tempfile.TemporaryDirectory() as folder, DeviceWorlds([_FAULTS]) as worlds:
        runner = Runner(worlds, Path(folder) / "progress")
        runner.try_all([one for one in runner.faults if only in f"{one.what}: {one.place}"], report)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.on_device", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that contain it")
    args = parser.parse_args()
    outcomes = run_faults(args.only)
    counts = Counter(one.by or "nothing" for one in outcomes)
    print(f"{len(outcomes) - counts['nothing']} of {len(outcomes)} noticed: {dict(counts)}")
    return int(counts["nothing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
