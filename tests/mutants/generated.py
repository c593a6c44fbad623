# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Generates mutants of the lines that changed since a commit, runs the tests that run each of these
lines, and keeps the outcomes in a journal, so that an interrupted run goes on where it was.
"""

import ast
import hashlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue.mutant import PACKAGE, Mutant, room_of
from tests.mutants.lines_run import LinesRun, RunTest
from tests.mutants.operators import Change, find_changes
from tests.mutants.run import MutantError, Verdict, run_tests

_HUNK = re.compile(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@|^\+\+\+ b/(.*)$", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)
_CAUGHT_STATUS = (1, 2, 3)  # a failed test, a module that cannot be imported, an error of pytest
_MOST_TESTS, _MOST_S = 200, 30.0  # of the tests of one mutant, and of their seconds when quiet
_FILE_S = 0.5  # to import a test file
NO_TEST = "no test runs it"


@dataclass(frozen=True)
class Generated:
    """A generated mutant. lines: of its statement; none for what runs when its module is imported,
    for which all tests of the file count."""

    change: Change
    mutant: Mutant
    lines: Sequence[int]

    @property
    def room(self) -> str:
        """The folder of the package."""
        return room_of(self.mutant.file)

    def find_tests(self, root: Path, lines_run: LinesRun) -> list[RunTest]:
        """Return the tests to run, quick ones first, as many as the time of one mutant allows."""
        text = (root / self.mutant.path).read_text()
        lines = self.lines or range(1, text.count("\n") + 2)
        chosen: list[RunTest] = []
        for test in lines_run.find_tests(self.mutant.file, text, lines)[:_MOST_TESTS]:
            files = {*(earlier.file for earlier in chosen), test.file}
            total_s = sum(earlier.seconds for earlier in chosen) + test.seconds
            if chosen and total_s + _FILE_S * len(files) > _MOST_S:
                break
            chosen.append(test)
        return chosen


def generate(root: Path, number: int, since: str, seed: int = 0) -> list[Generated]:
    """Choose `number` mutants of lines that changed since a commit, at most one of a line.

    A mutant's place in the order follows from the seed and its own text: other code that changes
    replaces no mutant of this.
    """
    drawn: list[tuple[str, Generated]] = []
    for path, lines in _changed_lines(root, since).items():
        text = (root / path).read_text()
        of_line: dict[int, tuple[str, Change]] = {}
        for change in find_changes(text, Path(path).name):
            order = hashlib.sha256(f"{seed} {change.key}".encode()).hexdigest()
            if change.line in lines:
                of_line[change.line] = min(of_line.get(change.line, ("g", change)), (order, change),
                                           key=lambda pair: pair[0])  # fmt: skip
        statements = _statement_lines(text)
        drawn += [
            (order, Generated(change, _mutant(path, text, change), statements.get(line, ())))
            for line, (order, change) in of_line.items()
        ]
    return [generated for _, generated in sorted(drawn, key=lambda pair: pair[0])[:number]]


def _changed_lines(root: Path, since: str) -> dict[str, set[int]]:
    """Return the numbers of lines by path, from the root."""
    command = ["git", "diff", "-U0", "-M", since, "--", PACKAGE]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise MutantError(done.stderr.strip())
    changed: dict[str, set[int]] = {}
    path = ""
    for match in _HUNK.finditer(done.stdout):
        if match[3]:
            path = match[3]
        else:
            first = int(match[1])
            changed.setdefault(path, set()).update(range(first, first + int(match[2] or 1)))
    return {path: lines for path, lines in changed.items() if path.endswith(".py")}


def _statement_lines(text: str) -> dict[int, range]:
    """By line within a function: the lines of its statement, of a compound one the head."""
    lines: dict[int, range] = {}

    def visit(node: ast.AST, is_in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and is_in_function:
                body = getattr(child, "body", None)
                stop = body[0].lineno if body else (child.end_lineno or child.lineno) + 1
                own = range(child.lineno, max(stop, child.lineno + 1))
                lines.update(dict.fromkeys(own, own))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            visit(child, is_in_function or is_function)

    visit(ast.parse(text), False)
    return lines


def _mutant(path: str, text: str, change: Change) -> Mutant:
    """Give a change as a snippet that the file has once, and its replacement."""
    begin, end = text.rfind("\n", 0, change.start) + 1, text.find("\n", change.stop)
    while text.count(text[begin:end]) > 1:
        begin = text.rfind("\n", 0, begin - 1) + 1
    new = text[begin : change.start] + change.new + text[change.stop : end]
    file = path.removeprefix(f"{PACKAGE}/")
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
        tests = generated.find_tests(tree, lines_run)
        known = journal.rows.get(generated.change.key)
        digest = hashlib.sha256("\n".join(test.address for test in tests).encode()).hexdigest()[:8]
        if known and (known["verdict"] == Verdict.CAUGHT or known["tests"] == digest):
            return known
        row = _run_one(generated, tests, tree) | {"tests": digest}
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
    start_s, verdict, test = time.monotonic(), NO_TEST, ""
    if tests:
        limit_s = 60 + 8 * sum(test.seconds for test in tests)
        addresses = [test.address for test in tests]
        status, text = run_tests(addresses, tree, generated.mutant, limit_s)
        verdict = Verdict.CAUGHT if status in _CAUGHT_STATUS else Verdict.MISSED
        if status is None:
            verdict = Verdict.TIMED_OUT
        failed = _FAILED.findall(text)
        if status == 1 and not failed:  # no test is to blame
            raise MutantError(f"{generated.change.key}: pytest did not run:\n{text}")
        test = failed[0] if failed else ""
    change, mutant = generated.change, generated.mutant
    return {
        "key": change.key,
        "operator": change.operator,
        "room": generated.room,
        "file": mutant.file,
        "line": change.line,
        "function": change.function,
        "old": mutant.old.strip(),
        "new": mutant.new.strip(),
        "verdict": verdict,
        "test": test,
        "num_tests": len(tests),
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
