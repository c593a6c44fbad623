# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what elastic_pretrain.py noted. Knows nothing of why nodes came and went."""

from dataclasses import dataclass, field
from pathlib import Path

# Ranks of one start begin together; no two starts are that near.
_TOGETHER_S = 3.0


@dataclass
class Attempt:
    """What the ranks of one start did: from which iteration, how many they were, the loss of each
    step and when it ended (seconds since 1970), and which local checkpoints were complete."""

    began_at: float
    began: int
    ranks: int
    losses: dict[int, float] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    local: set[int] = field(default_factory=set)


def read_attempts(folder: Path) -> list[Attempt]:
    """All starts that trained, in their order."""
    found: list[Attempt] = []
    notes = [[line.split() for line in path.read_text().splitlines()] for path in folder.iterdir()]
    for (_, when, began, ranks), *rest in sorted((one for one in notes if one), key=_start):
        attempt = Attempt(float(when), int(began), int(ranks))
        if found and attempt.began_at - found[-1].began_at < _TOGETHER_S:
            attempt = found[-1]
        else:
            found.append(attempt)
        for kind, when, iteration, *words in rest:
            if kind == "step":
                loss = float.fromhex(words[0])
                assert attempt.losses.setdefault(int(iteration), loss) == loss
                attempt.ended_at[int(iteration)] = float(when)
            elif kind == "local":
                attempt.local.add(int(iteration))
    return found


def _start(notes: list[list[str]]) -> float:
    return float(notes[0][1])
