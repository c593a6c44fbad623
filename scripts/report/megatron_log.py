# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the iteration lines that Megatron prints."""

import re
from collections.abc import Iterable
from typing import NamedTuple

# iteration      7/   300 | ... | elapsed time per iteration (ms): 93.1 | ... | lm loss: 5.1E+00 |
_ITERATION = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_FIELD = re.compile(r"\| ([^:|]+): +(\S+) (?=\|)")


class Iteration(NamedTuple):
    """One printed training step.

    `grad_norm` is None if Megatron prints none; so are, without --use-asynchzp, the milliseconds
    that computation waited and the rest of communication in %.
    """

    number: int
    total: int
    loss: float
    grad_norm: float | None
    step_ms: float
    exposed_comm_ms: float | None = None
    overlap_percent: float | None = None


def parse_iteration(line: str) -> Iteration | None:
    """Return the training step that `line` reports, or None."""
    head = _ITERATION.search(line)
    if head is None:
        return None
    fields = dict(_FIELD.findall(line))
    if "lm loss" not in fields:
        return None
    numbers = {
        name: float(fields[name]) if name in fields else None
        for name in ("grad norm", "exposed comm (ms)", "overlap (%)")
    }
    return Iteration(
        number=int(head[1]),
        total=int(head[2]),
        loss=float(fields["lm loss"]),
        grad_norm=numbers["grad norm"],
        step_ms=float(fields["elapsed time per iteration (ms)"]),
        exposed_comm_ms=numbers["exposed comm (ms)"],
        overlap_percent=numbers["overlap (%)"],
    )


def parse_log(lines: Iterable[str]) -> list[Iteration]:
    return [step for step in map(parse_iteration, lines) if step is not None]
