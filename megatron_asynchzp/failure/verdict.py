# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the answers to a roll call say together, in a few hundred bytes: one rank reads all the
answers, and all ranks read that."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_asynchzp.errors import runs_of

IS_HERE, HAS_FAILED = "here", "failed"
_MOST_FAILED = 8  # the first ones: they are the cause
_MOST_RANGES = 100  # of each kind: what thousands of ranks read has to be short


@dataclass
class Verdict:
    """Verdict of a roll call: who does not answer, and where those are that do.

    silent: ranks without an answer; num_silent: how many there are, which may be more.
    writing: ranks that wrote a checkpoint when they answered.
    failed: the ranks that failed first, in their order.
    behind: ranks that had not submitted as much as another, those that had least first, with what
        they had submitted on each lane. Who is nowhere in here has answered and is not behind.
    """

    silent: list[int] = field(default_factory=list)
    num_silent: int = 0
    writing: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    behind: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @classmethod
    def of_answers(cls, answers: str, world_size: int) -> "Verdict":
        """answers: "rank here writes counts...;" and "rank failed;", in the order they came."""
        counts: dict[int, tuple[int, ...]] = {}
        writing: list[int] = []
        failed: list[int] = []
        for entry in answers.split(";")[:-1]:
            rank, what, *numbers = entry.split()
            if what == HAS_FAILED:
                failed.append(int(rank))
                continue
            is_writing, *own = map(int, numbers)
            counts[int(rank)] = tuple(own)
            if is_writing:
                writing.append(int(rank))
        front = tuple(map(max, zip(*counts.values(), strict=True)))
        equal: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(counts):
            if counts[rank] != front:
                equal.setdefault(counts[rank], []).append(rank)
        silent = [rank for rank in range(world_size) if rank not in counts]
        by_place = sorted(equal.items(), key=lambda one: (sum(one[0]), one[0]))
        behind = [(ranks, list(own)) for own, ranks in by_place]
        first = list(dict.fromkeys(failed))[:_MOST_FAILED]
        return cls(silent, len(silent), sorted(writing), first, behind)

    def to_text(self) -> str:
        groups, left = [], _MOST_RANGES
        for ranks, counts in self.behind:
            text = _ranges(ranks, left)
            left -= text.count(",") + 1
            groups.append(f"{text} {' '.join(map(str, counts))}")
            if left <= 0:
                break
        parts = (
            f"{self.num_silent} {_ranges(self.silent)}",
            _ranges(self.writing),
            " ".join(map(str, self.failed)),
            *groups,
        )
        return ";".join(parts)

    @classmethod
    def of_text(cls, text: str) -> "Verdict":
        silent, writing, failed, *groups = text.split(";")
        number, _, ranges = silent.partition(" ")
        behind = [(_ranks(one.split()[0]), [int(n) for n in one.split()[1:]]) for one in groups]
        return cls(
            _ranks(ranges), int(number), _ranks(writing), [int(r) for r in failed.split()], behind
        )


def _ranges(ranks: Sequence[int], most: int = _MOST_RANGES) -> str:
    """Ranks in ascending order as "0-5,7", at most `most` ranges of them."""
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs_of(ranks)[:most])


def _ranks(text: str) -> list[int]:
    ends: Iterable[list[str]] = (one.split("-") for one in text.split(",") if one)
    return [rank for pair in ends for rank in range(int(pair[0]), int(pair[-1]) + 1)]
