# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Generates mutants of the lines that changed since a commit, runs the tests that run each of these
lines, and keeps the outcomes in a journal, so that an interrupted run goes on where it was.
"""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue.mutant import PACKAGE, Mutant, room_of
from tests.mutants.lines_run import LinesRun, RunTest, digest_of, keys_of_lines
from tests.mutants.operators import Change, find_changes
from tests.mutants.run import MutantError, Verdict, run_tests

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)
_MOST_TESTS, _MOST_S = 200, 30.0  # of the tests of one mutant, and of their seconds when quiet
_FILE_S = 0.5  # to import a test file
NO_TEST = "no test runs it"


@dataclass(frozen=True)
class Generated:
    """A generated mutant. keys: of its line, as in `keys_of_lines`."""

    change: Change
    mutant: Mutant
    keys: Sequence[str]

    @property
    def room(self) -> str:
        """The folder of the package."""
        return room_of(self.mutant.file)

    def told(self) -> dict:
        """Return the part of its row that does not depend on tests."""
        return {
            "key": self.change.key,
            "operator": self.change.operator,
            "room": self.room,
            "file": self.mutant.file,
            "line": self.change.line,
            "function": self.change.function,
            "old": self.mutant.old.strip(),
            "new": self.mutant.new.strip(),
        }

    def find_tests(self, lines_run: LinesRun) -> list[RunTest]:
        """Return the tests to run, quick ones first, as many as the time of one mutant allows."""
        chosen: list[RunTest] = []
        for test in lines_run.find_tests(self.keys)[:_MOST_TESTS]:
            files = {*(earlier.file for earlier in chosen), test.file}
            total_s = sum(earlier.seconds for earlier in chosen) + test.seconds
            if chosen and total_s + _FILE_S * len(files) > _MOST_S:
                break
            chosen.append(test)
        return chosen


def generate(root: Path, number: int, since: str, seed: int = 0) -> list[Generated]:
    """Choose `number` mutants of lines that changed since a commit, at most one of a line.

    A line has changed where its function had no such line then, in whatever folder. A mutant's
    place in the order follows from the seed and its own text alone.
    """
    known = _keys_at(root, since)
    drawn = dict[str, Generated]()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text, of_line = path.read_text(), dict[int, tuple[str, Change]]()
        for change in find_changes(text, path.name):
            if change.key not in known:
                order = hashlib.sha256(f"{seed} {change.key}".encode()).hexdigest()
                of_line[change.line] = min(of_line.get(change.line, ("g", change)), (order, change),
                                           key=lambda pair: pair[0])  # fmt: skip
        keys = keys_of_lines(text, path.name)
        file = str(path.relative_to(root / PACKAGE))
        for line, (order, change) in of_line.items():
            drawn[order] = Generated(change, _mutant(file, text, change), keys[line])
    return [drawn[order] for order in sorted(drawn)[:number]]


def _keys_at(root: Path, commit: str) -> set[str]:
    """Return the keys of all faults of the package as it was at a commit."""
    command = ["git", "archive", "--format=tar", commit, PACKAGE]
    done = subprocess.run(command, cwd=root, capture_output=True)
    if done.returncode:
        raise MutantError(done.stderr.decode().strip())
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        return {
            change.key
            for member in archive
            if member.name.endswith(".py") and (file := archive.extractfile(member))
            for change in find_changes(file.read().decode(), Path(member.name).name)
        }


def _mutant(file: str, text: str, change: Change) -> Mutant:
    """Give a change as a snippet that the file has once, and its replacement."""
    begin, end = text.rfind("\n", 0, change.start) + 1, text.find("\n", change.stop)
    while text.count(text[begin:end]) > 1:
        begin = text.rfind("\n", 0, begin - 1) + 1
    new = text[begin : change.start] + change.new + text[change.stop : end]
    return Mutant(change.key, change.operator, file, text[begin:end], new, "")


class Journal:
    """The outcomes so far, a JSON object a line; the last one of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        lines = path.read_text().splitlines() if path.is_file() else []
        self.rows: dict[str, dict] = {row["key"]: row for row in map(json.loads, lines)}

    def add(self, row: dict) -> None:
        """Keep a row at once."""
        with self._lock:
            self.rows[row["key"]] = row
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def run_generated(
    mutants: Sequence[Generated],
    tree: Path,
    lines_run: LinesRun,
    journal: Journal,
    at_once: int,
    report: Callable[[dict], None],
) -> list[dict]:
    """Run the mutants that the journal has not, or whose tests have changed since, and return the
    rows of all of them."""

    def run(generated: Generated) -> dict:
        tests = generated.find_tests(lines_run)
        known = journal.rows.get(generated.change.key)
        digest = digest_of(*sorted(test.address for test in tests))
        if known and (known["verdict"] == Verdict.CAUGHT or known["tests"] == digest):
            return known | generated.told()
        row = _run_one(generated, tests, tree)
        if known:  # a survivor, for which tests were added
            row["first_verdict"] = known.get("first_verdict", known["verdict"])
        journal.add(row)
        report(row)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(run, _rooms_in_turn(mutants)))
    _confirm(rows, tree, journal)
    return rows


def _confirm(rows: Sequence[dict], tree: Path, journal: Journal) -> None:
    """Run each test that caught a mutant on the unharmed tree, once. Raises MutantError where one
    fails there, whose mutants run again then."""
    due = [row for row in rows if row["verdict"] == Verdict.CAUGHT and "confirmed" not in row]
    tests = sorted({row["test"] for row in due if row["test"]})
    if not tests:
        return
    status, text = run_tests(tests, tree, limit_s=60.0 * len(tests), options=())
    failed = set(_FAILED.findall(text)) if status else set[str]()
    for row in due:
        if status in (0, 1) and row["test"] not in failed:
            row["confirmed"] = True
        else:
            row |= {"verdict": Verdict.MISSED, "tests": ""}
        journal.add(row)
    if status != 0:
        raise MutantError(f"tests fail on the unharmed tree: {', '.join(sorted(failed))}")


def _run_one(generated: Generated, tests: Sequence[RunTest], tree: Path) -> dict:
    start_s, verdict, failed = time.monotonic(), NO_TEST, list[str]()
    addresses = [test.address for test in tests]
    ran = digest_of(*sorted(addresses))
    if tests:
        limit_s = 60 + 8 * sum(test.seconds for test in tests)
        status, text = run_tests(addresses, tree, generated.mutant, limit_s)
        failed = _FAILED.findall(text) if status else []
        verdict = Verdict.CAUGHT if failed else Verdict.MISSED
        if status is None:
            verdict = Verdict.TIMED_OUT
        elif status and not failed:
            ran = ""  # no test is to blame: once more in the next run
    return generated.told() | {
        "verdict": verdict,
        "test": failed[0] if failed else "",
        "num_tests": len(tests),
        "tests": ran,
        "seconds": round(time.monotonic() - start_s, 1),
    }


def _rooms_in_turn(mutants: Sequence[Generated]) -> Iterator[Generated]:
    """Order them so that those that run at once are in different rooms."""
    rooms: dict[str, list[Generated]] = {}
    for mutant in mutants:
        rooms.setdefault(mutant.room, []).append(mutant)
    while rooms:
        for room in list(rooms):
            yield rooms[room].pop(0)
            if not rooms[room]:
                del rooms[room]
