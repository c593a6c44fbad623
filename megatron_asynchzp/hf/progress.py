# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How far a conversion is, on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator

# Yields the steps of its first argument; the second is their number.
type Progress = Callable[[Iterable, int], Iterable]


def no_progress(steps: Iterable, total: int) -> Iterable:
    return steps


def show_progress(steps: Iterable, total: int) -> Iterator:
    """A bar on stderr where that is a terminal, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import track

    is_seen = sys.stderr.isatty()
    yield from track(steps, "tensors", total, console=Console(stderr=True), disable=not is_seen)
