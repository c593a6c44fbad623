# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Applies mutants, each to a copy of the tree, and runs the one test that must notice. Knows no
mutant of its own.
"""

import compileall
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.mutants import warm_pytest
from tests.mutants.catalogue.mutant import Mutant

ROOT = Path(__file__).parents[2]
# What a test needs beside the package: itself, what it supports itself with, and pytest's settings.
_COPIED = ("megatron_asynchzp", "tests", "scripts", "docs", "pyproject.toml")
_TIME_LIMIT_S = 180.0
# pytest's exit status where tests ran and one failed; all others but 0 mean that none was decided.
_PASSED, _FAILED = 0, 1
_ENDLESS = None
_KEPT = 20_000  # characters of pytest's output, whose end names what failed
_WARM = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Let the server of this process import what tests need, once for all mutants.

    The command calls it, and no import: pytest, too, has only one such server, which is its ranks'.
    """
    _WARM.set_forkserver_preload(list(warm_pytest.PRELOADED))


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
        status, text = run_tests([mutant.test], tree, mutant)
        verdict = verdicts.get(status, Verdict.MISSED)
        outcome = Outcome(mutant, verdict, time.monotonic() - start_s, text)
        report(outcome)
        return outcome

    with prepared_tree() as tree, ThreadPoolExecutor(at_once) as pool:
        # All at once: they share what their ranks are forked from.
        unharmed = list(dict.fromkeys(mutant.test for mutant in mutants))
        status, text = run_tests(unharmed, tree)
        if status != _PASSED:
            raise MutantError(f"a test fails on the unharmed tree:\n{text}")
        return list(pool.map(run, mutants))


def run_tests(
    tests: Sequence[str],
    base: Path,
    mutant: Mutant | None = None,
    limit_s: float | None = None,
    options: Sequence[str] = ("-x",),
) -> tuple[int | None, str]:
    """Return pytest's status, or _ENDLESS, and the end of its output.

    base: a copy of the tree with what Python compiles of it, from `prepared_tree`.
    options: of pytest.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder) / "tree", Path(folder) / "log"
        shutil.copytree(base, copy)
        if mutant is not None:
            (copy / mutant.path).write_text(mutated(mutant, base))
        words = [*options, *tests]
        arguments = (copy, base.parent / "bytecode", log, words)
        process = _WARM.Process(target=warm_pytest.main, args=arguments)
        process.start()
        limit_s = limit_s or _TIME_LIMIT_S + 10 * len(tests)
        process.join(limit_s)
        status = process.exitcode
        _end_session(process)
        text = log.read_text(errors="replace")[-_KEPT:] if log.is_file() else ""
        return status, text if status is not None else f"not finished after {limit_s:.0f} s"


@contextlib.contextmanager
def prepared_tree() -> Iterator[Path]:
    """Copy what tests need, and compile it once for all mutants."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        compileall.compile_dir(tree, quiet=2)
        yield tree


def _end_session(process: BaseProcess) -> None:
    """Kill what is left of it, the servers of its ranks included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
