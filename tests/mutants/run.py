# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Applies mutants, each to a copy of the tree, and runs the one test that must notice. Knows no
mutant of its own.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.mutants.catalogue.mutant import Mutant

ROOT = Path(__file__).parents[2]
# What a test needs beside the package: itself, what it supports itself with, and pytest's settings.
_COPIED = ("megatron_asynchzp", "tests", "scripts", "docs", "pyproject.toml")
_TIME_LIMIT_S = 180.0
# pytest's exit status where tests ran and one failed; all others but 0 mean that none was decided.
_PASSED, _FAILED = 0, 1
_ENDLESS = None


class MutantError(RuntimeError):
    """A mutant that cannot be applied, or a test that fails without one."""


class Verdict(StrEnum):
    """CAUGHT: its test failed. TIMED_OUT: its test did not end; a fault that holds it up for ever
    is noticed too, but so ends a test on a machine that is busy. MISSED: its test passed, or did
    not run."""

    CAUGHT = "caught"
    TIMED_OUT = "timed out"
    MISSED = "not caught"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. seconds: until its test had ended."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    text: str


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file with the fault in it.

    Raises MutantError where there is no such file, or its snippet is not there exactly once.
    """
    path = root / mutant.path
    if not path.is_file():
        raise MutantError(f"{mutant.name}: no file {mutant.path}")
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        raise MutantError(
            f"{mutant.name}: {mutant.path} has {mutant.old!r} {count} times, not once"
        )
    return text.replace(mutant.old, mutant.new)


def run_mutants(
    mutants: Sequence[Mutant], at_once: int = 2, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run the tests on the unharmed tree, then each mutant's, `at_once` at a time; `report` is
    called as each mutant's ends.

    Raises MutantError where one cannot be applied, or a test fails without it.
    """
    for mutant in mutants:
        mutated(mutant)

    verdicts = {_FAILED: Verdict.CAUGHT, _ENDLESS: Verdict.TIMED_OUT}

    def run(mutant: Mutant) -> Outcome:
        start_s = time.monotonic()
        status, text = _run_tests([mutant.test], bytecode, mutant)
        verdict = verdicts.get(status, Verdict.MISSED)
        outcome = Outcome(mutant, verdict, time.monotonic() - start_s, text)
        report(outcome)
        return outcome

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        bytecode = Path(folder)
        # All at once: they share what their ranks are forked from.
        unharmed = list(dict.fromkeys(mutant.test for mutant in mutants))
        status, text = _run_tests(unharmed, bytecode)
        if status != _PASSED:
            raise MutantError(f"a test fails on the unharmed tree:\n{text}")
        return list(pool.map(run, mutants))


def _run_tests(
    tests: list[str], bytecode: Path, mutant: Mutant | None = None
) -> tuple[int | None, str]:
    """pytest's status, or _ENDLESS, and the end of what it printed.

    bytecode: where Python keeps what it compiles, of torch above all, from run to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        _copy_tree(copy)
        if mutant is not None:
            (copy / mutant.path).write_text(mutated(mutant))
        env = os.environ | {"PYTHONPATH": str(copy), "PYTHONPYCACHEPREFIX": str(bytecode)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        # A session of its own: its ranks end with it.
        process = subprocess.Popen(
            [*command, "-m", "not slow", *tests],
            cwd=copy,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit_s = _TIME_LIMIT_S + 10 * len(tests)
        try:
            text, _ = process.communicate(timeout=limit_s)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status, text = _ENDLESS, f"not finished after {limit_s:.0f} s"
        finally:
            _end_session(process)
        return status, text[-3000:]


def _copy_tree(copy: Path) -> None:
    copy.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)


def _end_session(process: subprocess.Popen) -> None:
    """Kill what is left of it, the forkserver of its ranks included."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()
