# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Summarises the answers to a roll call in a few hundred bytes, which all ranks read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_asynchzp.errors import runs_of

IS_HERE, HAS_FAILED = "here", "failed"
_MOST_FAILED = 8  # the first failures, which are the cause
_MOST_RANGES = 100  # of ranks, of each kind, because thousands of ranks read the text


@dataclass
class RollCallResult:
    """Which ranks do not answer, and how far the others are; the rest is not behind."""

    silent: list[int] = field(default_factory=list)  # without an answer, as far as listed
    num_silent: int = 0
    writing: list[int] = field(default_factory=list)  # that were writing a checkpoint
    failed: list[int] = field(default_factory=list)  # the first, in the order of failure
    behind: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Ranks that have submitted fewer tasks than others, the fewest first, with the tasks on each
    lane."""

    @classmethod
    def of_answers(cls, answers: str, world_size: int) -> "RollCallResult":
        """Summarise answers "rank here is_writing counts...;" and "rank failed;" in their order."""
        counts: dict[int, tuple[int, ...]] = {}
        writing: list[int] = []
        failed: list[int] = []
        for entry in answers.split(";")[:-1]:
            rank, word, *numbers = entry.split()
            if word == HAS_FAILED:
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
        fewest_first = sorted(equal.items(), key=lambda item: (sum(item[0]), item[0]))
        behind = [(ranks, list(own)) for own, ranks in fewest_first]
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
    def of_text(cls, text: str) -> "RollCallResult":
        silent, writing, failed, *groups = text.split(";")
        number, _, silent_ranges = silent.partition(" ")
        words = [group.split() for group in groups]
        behind = [(_ranks(ranges), [int(n) for n in counts]) for ranges, *counts in words]
        first_failed = [int(rank) for rank in failed.split()]
        return cls(_ranks(silent_ranges), int(number), _ranks(writing), first_failed, behind)


def _ranges(ranks: Sequence[int], most: int = _MOST_RANGES) -> str:
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs_of(ranks)[:most])


def _ranks(text: str) -> list[int]:
    ends: Iterable[list[str]] = (range_.split("-") for range_ in text.split(",") if range_)
    return [rank for pair in ends for rank in range(int(pair[0]), int(pair[-1]) + 1)]
