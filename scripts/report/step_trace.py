# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the trace of one training step (--asynchzp-trace FILE)."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.engine.comm.timeline import (
    CAPTURE,
    COMPUTE,
    WAIT,
    CommTimes,
    Span,
    measure_comm,
)
from megatron_asynchzp.errors import ConfigurationError

_SAME = 0.95  # spans of one direction that share this much are of one module


class Computation(NamedTuple):
    """One leaf: a unit's forward or backward in a micro-batch (counted from 0), in seconds."""

    unit: str
    direction: str
    batch: int
    is_recomputed: bool
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """One step.

    computations: leaves in order.
    outer: modules that contain leaves.
    spans: all of them; seconds count from where the step begins, and what was on its way then is
        before.
    began_s: that moment on the host's clock, 0 where the file has none.
    """

    name: str
    computations: tuple[Computation, ...]
    outer: tuple[Span, ...]
    spans: tuple[Span, ...]
    began_s: float = 0.0

    def lane(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.lane == name]

    def computes_itself(self, outer: Span) -> bool:
        """Whether most of its computation is not that of the leaves in it."""
        own_s, all_s = (
            sum(part.end - part.start for part in parts)
            for parts in (self.own_parts(outer), outside(outer, self.lane(WAIT)))
        )
        return own_s > 0.5 * all_s

    def own_parts(self, outer: Span) -> list[Span]:
        """The parts of `outer` in which it neither waits nor a leaf in it computes."""
        within = [each for each in self.computation_spans if _contains(outer, each)]
        return outside(outer, [*self.lane(WAIT), *within])

    @property
    def computation_spans(self) -> list[Span]:
        """The computation of leaves, as spans."""
        return [Span(COMPUTE, each.unit, each.start, each.end) for each in self.computations]

    @property
    def step_s(self) -> float:
        return self.lane(CAPTURE)[0].end

    @property
    def times(self) -> CommTimes:
        return measure_comm(self.spans)


def read_trace(path: Path) -> Trace:
    """Raises ConfigurationError, with the remedy, for anything that is not a trace of a step."""
    remedy = "name a file that a run with --asynchzp-trace has written"
    try:
        content = json.loads(path.read_text())
        events, began_s = content["traceEvents"], _began_s(content)
        spans = [
            Span(e["cat"], e["name"], 1e-6 * e["ts"], 1e-6 * (e["ts"] + e["dur"]))
            for e in events
            if e["ph"] == "X"
        ]
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: not a trace of a step; {remedy}") from error
    by_lane = {span.lane: span for span in spans}
    if not {COMPUTE, CAPTURE} <= by_lane.keys():
        raise ConfigurationError(f"{path}: no step in this trace; {remedy}")
    first = by_lane[CAPTURE].start
    moved = tuple(s._replace(start=s.start - first, end=s.end - first) for s in spans)
    leaves, outer = split_leaves([span for span in moved if span.lane == COMPUTE])
    return Trace(path.stem, tuple(number_batches(leaves)), tuple(outer), moved, began_s)


def _began_s(content: dict) -> float:
    return float(content.get("otherData", {}).get("began_s", 0.0))


def split_leaves(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Spans that contain no other one, by start, and those that do.

    Units of one module (a layer and its experts) begin and end together: the first stands for
    all of them.
    """
    leaves: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if not any(_is_same_module(span, other) for other in leaves[-8:]):
            leaves.append(span)
    outer = [
        span
        for span in leaves
        if any(other is not span and _contains(span, other) for other in leaves)
    ]
    return [span for span in leaves if span not in outer], outer


def outside(whole: Span | Computation, others: Iterable[Span]) -> list[Span]:
    """The parts of `whole` that no other span covers, by start."""
    parts, start = [], whole.start
    for other in sorted(others, key=lambda span: span.start):
        if other.start >= whole.end:
            break
        if other.start > start:
            parts.append(Span(COMPUTE, "", start, other.start))
        start = max(start, other.end)
    if start < whole.end:
        parts.append(Span(COMPUTE, "", start, whole.end))
    return parts


def _contains(outer: Span, inner: Span | Computation) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def _is_same_module(one: Span, other: Span) -> bool:
    shared = min(one.end, other.end) - max(one.start, other.start)
    longest = max(one.end - one.start, other.end - other.start)
    return direction_of(one) == direction_of(other) and shared > _SAME * longest


def direction_of(span: Span) -> str:
    return span.name.partition(" ")[0]


def unit_of(span: Span) -> str:
    return span.name.partition(" ")[2]


def number_batches(leaves: Sequence[Span]) -> list[Computation]:
    """Each unit's n-th forward and n-th backward are of micro-batch n.

    Where a unit has more forwards than backwards it is recomputed: the forward that comes right
    before its backward belongs to that.
    """
    by_unit: dict[str, list[Span]] = {}
    for span in leaves:
        by_unit.setdefault(unit_of(span), []).append(span)
    done: list[Computation] = []
    for unit, spans in by_unit.items():
        counts = Counter(map(direction_of, spans))
        recomputes = counts["forward"] > counts["backward"] > 0
        numbers: Counter[str] = Counter()
        for span, following in zip(spans, [*spans[1:], None]):
            direction = direction_of(span)
            is_again = (
                recomputes
                and direction == "forward"
                and following is not None
                and direction_of(following) == "backward"
            )
            counted = "backward" if is_again else direction
            batch = numbers[counted]
            numbers[counted] += not is_again
            done.append(Computation(unit, direction, batch, is_again, span.start, span.end))
    return sorted(done, key=lambda computation: computation.start)


def short_names(units: Iterable[str]) -> dict[str, str]:
    """A name that no other unit has: the number of a layer and what follows it, else a word."""
    names = {}
    for unit in units:
        words = [word for word in unit.split(".") if word not in ("module", "weight")] or [unit]
        numbers = [i for i, word in enumerate(words) if word.isdigit()]
        if numbers:
            names[unit] = ".".join(words[numbers[0] :])
        else:
            names[unit] = re.sub(r"_?(layer|embeddings?)$", "", words[-1]) or words[-1]
    return names
