# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Knows which fast tests run a statement of the package. Each test file runs once under
`line_notes.py`; a cache keeps what it ran by the file's content, so that a changed test file alone
runs again.

Inside pytest this file is a plugin: it tells the notes which test runs.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.catalogue.mutant import PACKAGE

# What these do in the first of their tests, the others look at too.
_SHARES = re.compile(r'scope="(module|session)"|@(functools\.)?cache\b')
_RECORDS = "records.jsonl"


def digest_of(*words: str) -> str:
    """Return a short name for these words."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:10]


def keys_of_lines(text: str, name: str) -> dict[int, tuple[str, ...]]:
    """Return, by line of a source, the keys of its statement (of a compound one the head), its
    function and its file; outside functions the file's key alone. Keys stay where code moves.
    """
    lines = text.split("\n")
    keys = dict.fromkeys(range(1, len(lines) + 1), (digest_of(name),))

    def visit(node: ast.AST, function: str, is_in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and is_in_function:
                body = getattr(child, "body", None)
                stop = body[0].lineno if body else (child.end_lineno or child.lineno) + 1
                own = range(child.lineno, max(stop, child.lineno + 1))
                head = " ".join(" ".join(lines[line - 1] for line in own).split())
                scopes = (digest_of(name, function, head), digest_of(name, function))
                keys.update(dict.fromkeys(own, (*scopes, digest_of(name))))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            below = f"{function}.{child.name}" if named else function
            visit(child, below, is_in_function or is_function)

    visit(ast.parse(text), "", False)
    return keys


@dataclass(frozen=True)
class RunTest:
    """A fast test that passed. seconds: that it took; file_shares: other tests of its file may look
    at what it did."""

    address: str
    seconds: float
    file_shares: bool

    @property
    def file(self) -> str:
        """The test file, from the root of the tree."""
        return self.address.partition("::")[0]


class LinesRun:
    """The tests that run each statement."""

    def __init__(self) -> None:
        self._tests: list[RunTest] = []
        self._tests_of = defaultdict[str, list[RunTest]](list)

    def add(self, entry: dict) -> None:
        """Add what a test file ran."""
        for address, run in entry["tests"].items():
            if run["outcome"] == "passed":
                test = RunTest(address, run["seconds"], entry["shares"])
                self._tests.append(test)
                for key in run["keys"]:
                    self._tests_of[key].append(test)

    def find_tests(self, keys: Sequence[str]) -> list[RunTest]:
        """Return the tests that run a statement, or else its function, of these keys, quick tests
        first; then the rest of those files whose tests look at what others did."""
        tests = next((self._tests_of[key] for key in keys[:2] if key in self._tests_of), [])
        shared = {test.file for test in tests if test.file_shares}
        more = {test for test in self._tests if test.file in shared}.difference(tests)
        return [test for part in (tests, more) for test in sorted(part, key=lambda t: t.seconds)]


def read_lines_run(folder: Path, root: Path, files: Sequence[str]) -> tuple[LinesRun, list[str]]:
    """Return what the cache has of these test files of a tree, and the files that it has not."""
    lines_run, missing = LinesRun(), list[str]()
    for file in files:
        cached = folder / f"{digest_of(file, (root / file).read_text())}.json"
        if cached.is_file():
            lines_run.add(json.loads(cached.read_text()))
        else:
            missing.append(file)
    return lines_run, missing


def watch(folder: Path, base: Path, files: Sequence[str]) -> None:
    """Run test files with notes of their lines, in a copy of the tree `base`, and keep in the cache
    what they ran."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(base, tree)
        shutil.copy(Path(__file__).with_name("line_notes.py"), tree / "sitecustomize.py")
        (tree.parent / "lines").mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        env = os.environ | {
            "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(base.parent / "bytecode")
        }  # fmt: skip
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(
            [*command, "-p", __name__, *files], cwd=tree, env=env, stdout=subprocess.DEVNULL
        )
        _store(folder, tree, files, has_ended=done.returncode in (0, 1, 5))


def _store(folder: Path, tree: Path, files: Sequence[str], has_ended: bool) -> None:
    """Move the notes of a run of pytest in `tree` into the cache, an entry for each test file; of a
    run that broke off those before the last, whose tests may not all have run."""
    notes, runs = tree.parent / "lines", defaultdict[str, dict[str, dict]](dict)
    records = notes / _RECORDS
    for record in map(json.loads, records.read_text().splitlines() if records.is_file() else ()):
        run = runs[record["test"].partition("::")[0]].setdefault(
            record["test"], {"seconds": 0.0, "outcome": "passed"}
        )
        run["seconds"] += record["seconds"]
        if record["outcome"] != "passed":
            run["outcome"] = record["outcome"]
    keys_of = dict[str, dict[int, tuple[str, ...]]]()
    folder.mkdir(parents=True, exist_ok=True)
    for file in files if has_ended else [*runs][:-1]:
        tests = runs.get(file, {})  # none where all are slow
        for address, run in tests.items():
            keys = set[str]()
            for note in set((notes / f"{digest_of(address)}.lines").read_text().splitlines()):
                path, _, line = note.rpartition(":")
                if path not in keys_of:
                    source = tree / PACKAGE / path
                    keys_of[path] = keys_of_lines(source.read_text(), source.name)
                keys.update(keys_of[path][int(line)])
            run["keys"] = sorted(keys)
        text = (tree / file).read_text()
        entry = {"file": file, "shares": bool(_SHARES.search(text)), "tests": tests}
        (folder / f"{digest_of(file, text)}.json").write_text(json.dumps(entry))


# ---- inside pytest


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the lines of this test from now on."""
    sys.modules["sitecustomize"].notes.begin_test(digest_of(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record how long a phase of a test took, and its outcome."""
    record = {"test": report.nodeid, "seconds": report.duration, "outcome": report.outcome}
    lines = Path(sys.modules["sitecustomize"].__file__ or "").parents[1] / "lines"
    with (lines / _RECORDS).open("a") as file:
        file.write(json.dumps(record) + "\n")
