# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what struck_pretrain.py noted. Knows nothing of who struck it, or why."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Ranks of one start begin together; where nodes come and go no two starts are that near.
_TOGETHER_S = 3.0


@dataclass
class Attempt:
    """What the ranks of one start did: the iteration it began from (None: it did not train), when
    (seconds since 1970) and on how many ranks, the losses of its steps, which folders it saved
    into, which of them became complete, and where it was struck."""

    began: int | None = None
    began_at: float = 0.0
    ranks: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    saving: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)

    def read(self, lines: Iterable[str]) -> None:
        """Add the notes of one rank. All ranks that know the loss of a step have the same."""
        for kind, when, *words in map(str.split, lines):
            if kind == "began":
                self.began, self.ranks = map(int, words)
                self.began_at = float(when)
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
    """All starts of the same nodes, in their order."""
    found: dict[int, Attempt] = {}
    for path in sorted(folder.iterdir()):
        number = int(path.name.partition(".")[0])
        found.setdefault(number, Attempt()).read(path.read_text().splitlines())
    return [found.get(number, Attempt()) for number in range(max(found, default=-1) + 1)]


def read_starts(folder: Path) -> list[Attempt]:
    """All starts that trained, in their order, where each node counts its own."""
    found: list[Attempt] = []
    notes = [path.read_text().splitlines() for path in folder.iterdir()]
    begun = [lines for lines in notes if lines and lines[0].startswith("began")]
    for lines in sorted(begun, key=lambda lines: float(lines[0].split()[1])):
        if not found or float(lines[0].split()[1]) - found[-1].began_at >= _TOGETHER_S:
            found.append(Attempt())
        found[-1].read(lines)
    return found
