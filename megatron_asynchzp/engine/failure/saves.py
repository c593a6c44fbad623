# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that a rank is saving, during which ranks wait for each other's files."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class SaveLog:
    """A rank's unfinished saves. Only the main thread changes them."""

    def __init__(self) -> None:
        self.pending: list[Path | str] = []  # folders, the oldest save first
        # Of the main thread, the innermost last; None for the oldest save in the background.
        self._entered: list[Path | str | None] = []

    @contextmanager
    def entering(self, folder: Path | str | None) -> Generator[None]:
        """Count the block as a part of the save of `folder`, or of the oldest in the background."""
        self._entered.append(folder)
        try:
            yield
        finally:
            self._entered.pop()

    @property
    def current(self) -> Path | str | None:
        # Copies, because the main thread may leave a save meanwhile.
        for folder in self._entered[-1:]:
            return folder if folder is not None else next(iter(self.pending[:1]), None)
        return None

    def title(self, collective: str | None) -> str | None:
        """Name the main thread's save, and its collective, for a message; None without a save."""
        if (folder := self.current) is None:
            return None
        return " in ".join(filter(None, [collective, f"the save of {folder}"]))
