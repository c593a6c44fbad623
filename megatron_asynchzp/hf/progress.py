# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a conversion on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator

type Progress = Callable[[Iterable, int], Iterable]
"""Yields the steps of its first argument, whose number is the second."""


def no_progress(steps: Iterable, total: int) -> Iterable:
    return steps


def show_progress(steps: Iterable, total: int) -> Iterator:
    from rich.console import Console
    from rich.progress import track

    is_terminal = sys.stderr.isatty()
    console = Console(stderr=True)
    yield from track(steps, "tensors", total, console=console, disable=not is_terminal)
