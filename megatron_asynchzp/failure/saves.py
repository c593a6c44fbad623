# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which checkpoints a rank is saving, so that a failure meanwhile names them: ranks wait for
each other's files there. Knows no file.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class Saves:
    """Saves of one rank. The main thread changes it; other threads read it.

    beside: folders of checkpoints that are written beside training, the oldest first.
    """

    def __init__(self) -> None:
        self.beside: list[Path | str] = []
        # By the main thread, the innermost last; None for the oldest of those beside training.
        self._entered: list[Path | str | None] = []

    @contextmanager
    def entering(self, folder: Path | str | None) -> Generator[None]:
        """Make what the main thread does within part of the save of `folder`; None: of whichever is
        the oldest beside training."""
        self._entered.append(folder)
        try:
            yield
        finally:
            self._entered.pop()

    @property
    def current(self) -> Path | str | None:
        """The folder into which the main thread saves; None where it saves nothing."""
        # Copies: the main thread may leave a save between two looks.
        for folder in self._entered[-1:]:
            return folder if folder is not None else next(iter(self.beside[:1]), None)
        return None

    def title(self, where: str | None) -> str | None:
        """Say where the main thread is, for a line: `where`, a collective if it is one, as part of
        its save; None where it saves nothing."""
        if (folder := self.current) is None:
            return None
        return " in ".join(filter(None, [where, f"the save of {folder}"]))
