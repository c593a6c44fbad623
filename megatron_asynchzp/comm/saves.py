# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which checkpoints a rank is saving, so that a failure meanwhile names them: ranks wait for
each other's files there. Knows no file.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megatron_asynchzp.comm.other_collective import collective_of_main_thread


class Saves:
    """Of one rank.

    beside: folders of checkpoints that are written beside training, the oldest first.
    """

    def __init__(self) -> None:
        self.beside: list[Path | str] = []
        self._entered: list[Path | str] = []  # by the main thread, the innermost last

    @contextmanager
    def entering(self, folder: Path | str) -> Generator[None]:
        """What the main thread does within is part of the save of `folder`."""
        self._entered.append(folder)
        try:
            yield
        finally:
            self._entered.pop()

    def title(self, where: str | None) -> str | None:
        """What the main thread is in, for a line: `where`, a collective if it is one, as part of
        its save; None where it saves nothing."""
        if not self._entered:
            return None
        return " in ".join(filter(None, [where, f"the save of {self._entered[-1]}"]))

    def is_writing(self) -> bool:
        """Whether the main thread saves and is in no collective: others may wait for its files."""
        return bool(self._entered) and collective_of_main_thread() is None
