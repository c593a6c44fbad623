# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Knows which fast tests run a line of the package. Each test file runs once under `line_notes.py`;
its lines are kept in a cache by the file's content, so that a changed test file alone runs again.

Inside pytest this file is a plugin: it tells the notes which test runs.
"""

import difflib
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
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# What these do in the first of their tests, the others look at too.
_SHARES = re.compile(r'scope="(module|session)"|@(functools\.)?cache\b')


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


@dataclass
class LinesRun:
    """The tests that run each line, of the sources as they were when the tests ran."""

    folder: Path
    tests: list[RunTest] = field(default_factory=list)
    _tests_of: dict[tuple[str, str], dict[int, list[RunTest]]] = field(default_factory=dict)
    _moved: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)

    def add(self, entry: dict) -> None:
        """Add what a test file ran."""
        for address, run in entry["tests"].items():
            if run["outcome"] != "passed":
                continue
            test = RunTest(address, run["seconds"], entry["shares"])
            self.tests.append(test)
            for path, lines in run["lines"].items():
                tests_of = self._tests_of.setdefault((path, entry["sources"][path]), {})
                for line in lines:
                    tests_of.setdefault(line, []).append(test)

    def find_tests(self, path: str, text: str, lines: Sequence[int]) -> list[RunTest]:
        """Return the tests that run one of `lines` of the file, whose source is `text` now, quick
        tests first; then the rest of those files whose tests look at what others did."""
        tests: dict[RunTest, None] = {}
        for (known, digest), tests_of in self._tests_of.items():
            if known == path:
                moved = self._lines_then(path, digest, text)
                for line in lines:
                    tests |= dict.fromkeys(tests_of.get(moved.get(line, 0), ()))
        shared = {test.file for test in tests if test.file_shares}
        more = [test for test in self.tests if test.file in shared and test not in tests]
        return [
            *sorted(tests, key=lambda test: test.seconds),
            *sorted(more, key=lambda test: test.seconds),
        ]

    def _lines_then(self, path: str, digest: str, text: str) -> dict[int, int]:
        """By line of `text`: the line of the source of that digest with the same words."""
        key = (digest, _digest(text))
        if key not in self._moved:
            then = (self.folder / "sources" / digest).read_text()
            matcher = difflib.SequenceMatcher(None, text.split("\n"), then.split("\n"), False)
            self._moved[key] = {
                now + step + 1: before + step + 1
                for now, before, length in matcher.get_matching_blocks()
                for step in range(length)
            }
        return self._moved[key]


def read_lines_run(folder: Path, root: Path, files: Sequence[str]) -> tuple[LinesRun, list[str]]:
    """Return what the cache has of these test files of a tree, and the files that it has not."""
    lines_run, missing = LinesRun(folder), list[str]()
    for file in files:
        cached = folder / f"{_digest((root / file).read_text())}.json"
        if cached.is_file():
            lines_run.add(json.loads(cached.read_text()))
        else:
            missing.append(file)
    return lines_run, missing


def store_lines_run(folder: Path, tree: Path, is_ended: bool = True) -> None:
    """Move the notes of a run of pytest in `tree` into the cache, one entry for each test file.

    is_ended: False leaves out the last file, whose tests may not all have run.
    """
    runs: dict[str, dict[str, dict]] = defaultdict(dict)
    for record in map(json.loads, (tree.parent / "lines" / _RECORDS).read_text().splitlines()):
        run = runs[record["test"].partition("::")[0]].setdefault(
            record["test"], {"seconds": 0.0, "outcome": "passed"}
        )
        run["seconds"] += record["seconds"]
        if record["outcome"] != "passed":
            run["outcome"] = record["outcome"]
    for file in list(runs)[: None if is_ended else -1]:
        sources: dict[str, str] = {}
        for address, run in runs[file].items():
            run["lines"] = lines = defaultdict(list)
            notes = tree.parent / "lines" / f"{_name_of(address)}.lines"
            for line in sorted(set(notes.read_text().splitlines())):
                path, _, number = line.rpartition(":")
                lines[path].append(int(number))
            for path in lines:
                text = (tree / "megatron_asynchzp" / path).read_text()
                sources[path] = store_source(folder, text)
        text = (tree / file).read_text()
        entry = {
            "file": file,
            "shares": bool(_SHARES.search(text)),
            "sources": sources,
            "tests": runs[file],
        }
        (folder / f"{_digest(text)}.json").write_text(json.dumps(entry))


def store_source(folder: Path, text: str) -> str:
    """Keep the text whose lines were run in the cache; returns its digest."""
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    (folder / "sources" / _digest(text)).write_text(text)
    return _digest(text)


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
        store_lines_run(folder, tree, is_ended=done.returncode in (0, 1))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- inside pytest

_RECORDS = "records.jsonl"
_name_of = _digest


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the lines of this test from now on."""
    sys.modules["sitecustomize"].notes.begin_test(_name_of(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record how long a phase of a test took, and its outcome."""
    record = {"test": report.nodeid, "seconds": report.duration, "outcome": report.outcome}
    lines = Path(sys.modules["sitecustomize"].__file__ or "").parents[1] / "lines"
    with (lines / _RECORDS).open("a") as file:
        file.write(json.dumps(record) + "\n")
