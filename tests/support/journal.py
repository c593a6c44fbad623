# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what interrupted_pretrain.py noted. Knows nothing of who interrupted it, or why."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Attempt:
    """What the ranks of one start did: the iteration it began from (None: it did not train), the
    losses of its steps, which folders it saved into, and which of them became complete."""

    began: int | None = None
    losses: dict[int, str] = field(default_factory=dict)
    saving: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)

    def read(self, lines: Iterable[str]) -> None:
        """Add the notes of one rank. All ranks that know the loss of a step have the same."""
        for kind, *words in map(str.split, lines):
            if kind == "began":
                self.began = int(words[0])
            elif kind == "step":
                assert self.losses.setdefault(int(words[0]), words[1]) == words[1]
            else:
                output = getattr(self, kind)
                output += [word for word in words if word not in output]

    @property
    def last_step(self) -> int:
        """The last one that a rank has finished."""
        return max(self.losses, default=self.began or 0)


def read_journal(folder: Path) -> list[Attempt]:
    """All starts, in their order."""
    found: dict[int, Attempt] = {}
    for path in sorted(folder.iterdir()):
        found.setdefault(int(path.stem), Attempt()).read(path.read_text().splitlines())
    return [found.get(number, Attempt()) for number in range(max(found, default=-1) + 1)]
