# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The error that every part of the package raises for bad input, and how its lines name ranks."""

from collections.abc import Sequence

_MOST_RUNS = 8


class ConfigurationError(ValueError):
    """A run that cannot start as asked. The message is one line, for the user."""


def name_ranks(ranks: Sequence[int]) -> str:
    """In words that stay short for thousands: "rank 3", "ranks 1, 4 to 7", "ranks 0, 8, ..., 504".

    ranks: sorted, each once. Without a rule in them the first are named, and how many more.
    """
    if not ranks:
        return "no rank"
    plural = "s" if len(ranks) > 1 else ""
    steps = {after - before for before, after in zip(ranks, ranks[1:])}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named, rest = runs[:_MOST_RUNS], sum(b - a + 1 for a, b in runs[_MOST_RUNS:])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in named]
    return f"rank{plural} {', '.join(parts)}{f' and {rest} more' if rest else ''}"
