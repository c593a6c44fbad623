# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Notes the lines of the package that each process of a test runs. A copy of this file is the
`sitecustomize.py` of the copied tree in which tests are watched, so that Python imports it at the
start of every process there: pytest, the servers of ranks, and command lines.

A process appends each line once, as `path:line`, to the notes of the test that runs now. The test
kills ranks that have answered, so no note waits in memory. A forked rank reads which test runs.
"""

import contextlib
import os
from pathlib import Path
from sys import monitoring
from types import CodeType
from typing import Any

_TOOL, _EVENTS = monitoring.COVERAGE_ID, monitoring.events


class LineNotes:
    """The notes of this process. `folder` has one file for each test."""

    def __init__(self, folder: Path, sources: str) -> None:
        self._current, self._folder, self._sources = folder / "current", folder, sources
        self._file = -1
        monitoring.use_tool_id(_TOOL, "mutants")
        monitoring.register_callback(_TOOL, _EVENTS.PY_START, self._begin_function)
        monitoring.register_callback(_TOOL, _EVENTS.LINE, self._note)
        monitoring.set_events(_TOOL, _EVENTS.PY_START)
        os.register_at_fork(after_in_child=self.follow)
        self.follow()

    def begin_test(self, name: str) -> None:
        """Tell all processes that start from now on which test runs."""
        self._current.write_text(name)
        self.follow()

    def follow(self) -> None:
        """Open the notes of the test that runs now, and note each line again."""
        if self._file >= 0:
            os.close(self._file)
        name = self._current.read_text() if self._current.is_file() else "none"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self._folder / f"{name}.lines", flags, 0o644)
        monitoring.restart_events()

    def _begin_function(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(self._sources):
            monitoring.set_local_events(_TOOL, code, _EVENTS.LINE)
        return monitoring.DISABLE

    def _note(self, code: CodeType, line: int) -> Any:
        with contextlib.suppress(OSError):  # the program closed a descriptor that it did not open
            os.write(self._file, f"{code.co_filename[len(self._sources) :]}:{line}\n".encode())
        return monitoring.DISABLE


notes: LineNotes | None = None
if __name__ == "sitecustomize":
    tree = Path(__file__).parent
    notes = LineNotes(tree.parent / "lines", f"{tree}/megatron_asynchzp/")
