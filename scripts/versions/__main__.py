# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a fast set of tests beside other versions of torch, Megatron and Python.

    ./scripts/test_versions.sh                      all cells
    ./scripts/test_versions.sh --torch 2.15.0 --megatron 0.18.2 --python 3.13
    ./scripts/test_versions.sh --newest-torch       the newest torch that is tested
    ./scripts/test_versions.sh --checkpoints        written beside some, loaded beside all others

With --out the results are added to a file of records, a line a cell.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from scripts.report.records import append
from scripts.testbed.machine import machine_record
from scripts.versions.cells import CELLS, CHECKPOINT_CELLS, NEWEST_TORCH, Cell
from scripts.versions.environments import (
    FOLDER,
    ROOT,
    NoEnvironment,
    environment_of,
    python_of,
    replaced_by_install,
)
from scripts.versions.moves import MoveFailed, moves

_RAN = (0, 1)  # pytest's status where it ran all that was asked for, without and with failures
_SAME_LOSSES = 1e-6  # relative: other versions add in another order


class Outcome(NamedTuple):
    """A line of the record, the lines for the screen, and whether they name a fault."""

    line: dict
    said: list[str]
    is_wrong: bool


def run(cell: Cell) -> dict:
    """The tests of a cell: how many passed, and the names of those that did not. Before them, that
    an install of this package replaces nothing there."""
    line = {"kind": "cell", "cell": cell._asdict(), "date": time.strftime("%Y-%m-%d")}
    try:
        python = python_of(cell)
        replaced = replaced_by_install(cell, python)
    except NoEnvironment as error:
        return line | {"passed": 0, "failed": [], "reason": str(error)}
    if replaced:
        reason = f"an install replaces {', '.join(replaced)}"
        return line | {"passed": 0, "failed": [], "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # fmt: off
        command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-n", "2",
                   "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}",
                   *cell.tests]
        # fmt: on
        log = FOLDER / f"{cell.name}.log"
        with log.open("w") as out:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment_of(cell), stdout=out, stderr=subprocess.STDOUT
            )
        if not report.is_file():
            return line | {"passed": 0, "failed": [], "reason": f"no report: see {log.name}"}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [_name(case) for case in cases if _has(case, "failure", "error")]
    skipped = [case for case in cases if _has(case, "skipped")]
    num_passed = len(cases) - len(failed) - len(skipped)
    line |= {"passed": num_passed, "skipped": len(skipped), "failed": failed}
    if ended.returncode not in _RAN or not num_passed:
        reason = f"pytest ended with status {ended.returncode}, {num_passed} passed: see {log.name}"
        return line | {"reason": reason}
    return line


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def cells_of(args: argparse.Namespace) -> Sequence[Cell]:
    """All of them, or the one that is asked for."""
    if args.newest_torch:
        return [NEWEST_TORCH]
    asked = _asked(args)
    return [Cell(**asked)] if asked else CELLS


def _asked(args: argparse.Namespace) -> dict[str, str]:
    return {name: getattr(args, name) for name in Cell._fields if getattr(args, name)}


def outcomes_of(cells: Sequence[Cell]) -> Iterator[Outcome]:
    for index, cell in enumerate(cells, 1):
        print(f"{index} of {len(cells)}: {cell.name}", flush=True)
        line = run(cell)
        said = line.get("reason") or f"{line['passed']} passed, {len(line['failed'])} failed"
        failed = [f"FAILED {name}" for name in line["failed"]]
        yield Outcome(line, [said, *failed], bool(failed or "reason" in line))


def moved_checkpoints() -> Iterator[Outcome]:
    for line in moves(CHECKPOINT_CELLS, partial(print, flush=True)):
        written, loaded = (Cell(**line[key]).name for key in ("written", "loaded"))
        same = f"{line.get('tensors')} tensors, {len(line.get('differing', []))} differ"
        same += f", losses by {line.get('loss_error', 0.0):.0e}"
        is_wrong = "reason" in line or bool(line["differing"])
        is_wrong |= not line.get("loss_error", 0.0) <= _SAME_LOSSES
        yield Outcome(line, [f"{written} -> {loaded}: {line.get('reason', same)}"], is_wrong)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="test_versions.sh", description=(__doc__ or "").partition("\n\n")[0]
    )
    for name in Cell._fields:
        parser.add_argument(f"--{name}", type=_version, metavar="VERSION")
    parser.add_argument("--newest-torch", action="store_true", help="the cell of the newest torch")
    parser.add_argument(
        "--checkpoints", action="store_true", help="instead: checkpoints between versions"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of records to add to")
    args = parser.parse_args(argv)
    if args.checkpoints + args.newest_torch + bool(_asked(args)) > 1:
        parser.error("--checkpoints and --newest-torch have versions of their own: give one alone")
    is_wrong = False
    if args.out:
        append(args.out, machine_record(shlex.join(["./scripts/test_versions.sh", *argv])))
    try:
        for outcome in moved_checkpoints() if args.checkpoints else outcomes_of(cells_of(args)):
            is_wrong |= outcome.is_wrong
            print("\n".join(f"    {said}" for said in outcome.said), flush=True)
            if args.out:
                append(args.out, outcome.line)
    except (NoEnvironment, MoveFailed) as error:
        print(f"test_versions.sh: {error}", file=sys.stderr)
        return 1
    return int(is_wrong)


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*\w*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 2.15.0")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
