# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what happened when: spans of computation, of collectives and of waiting, on one clock, and
the trace files made of them.
"""

import json
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_asynchzp.device import Device

LANES = {
    "gather": "all-gather of the parameters",
    "reduce": "reduce-scatter of the gradients",
    "grad-sync": "reduction of the gradient shard",
    "param-sync": "gather of the updated parameter shard",
    "matrices": "exchange of the matrices",
    "order": "comparison of the order of collectives",
}
"""Kinds of operation, each with its name in messages. A lane has a stream, and completes its tasks
one after the other."""

COMPUTE, WAIT, BETWEEN, CAPTURE = "compute", "wait", "between", "capture"
"""Lanes of the main thread: what it computed, what it waited for, the time from the end of a step's
computation to the begin of the next step, and how long a capture lasted."""


class Span(NamedTuple):
    """Something that ran from one mark of the device to another."""

    lane: str
    name: str
    start: Any
    end: Any


_NOT_RECORDED = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Show what happens within by `name` in a trace of torch.profiler that records this thread."""
    # Each task passes here: this takes a fifteenth of record_function where nothing is recorded.
    is_recorded = torch.autograd._profiler_enabled()  # pyright: ignore
    return torch.profiler.record_function(f"asynchzp: {name}") if is_recorded else _NOT_RECORDED


@dataclass(frozen=True)
class CommTimes:
    """Seconds of communication in some steps. busy: during which at least one collective was on its
    way; exposed: for which computation had to wait; steps: how many were timed."""

    busy_s: float = 0.0
    exposed_s: float = 0.0
    steps: int = 0

    def __add__(self, other: "CommTimes") -> "CommTimes":
        return CommTimes(
            self.busy_s + other.busy_s, self.exposed_s + other.exposed_s, self.steps + other.steps
        )

    @property
    def overlap(self) -> float | None:
        """The part of the communication that computation did not wait for, in [0, 1]; None where
        there was none."""
        return max(0.0, 1.0 - self.exposed_s / self.busy_s) if self.busy_s else None


class Timeline:
    """Records spans. Any thread may add (list.append is atomic), the rest is for the main one.

    every: on a device that runs ahead, where a mark is an event in a stream, one step in so many is
    timed; a CPU's marks cost nothing, and all its steps are. An evaluation is not, nor what is
    waited for between two steps.

    On a device a step is timed from the end of the computation of the one before, whose updated
    parameters travel from there on: a host that waits for the device there, or a collective that
    waits for its turn, hides them from every wait.
    """

    def __init__(self, device: Device, every: int = 1):
        self.device = device
        self._every = every if device.runs_ahead else 1
        self._is_timing, self._is_in_step = False, False
        self._step = 0
        self._computed: Any = None  # where the computation of the step before ended
        self._spans: list[Span] = []
        self._folding: list[list[Span]] = []
        self._captured: list[Span] | None = None
        self._capture_start: Any = None
        self._capture_began_s = 0.0
        self._times = CommTimes()

    def mark(self) -> Any:
        """Now, on the current stream, as the start of a span; None where nothing is recorded."""
        return self.device.mark() if self._is_timing else None

    def note(self, lane: str, name: str, start: Any) -> None:
        """Record that something ran from the mark `start` until now; nothing where it is None."""
        if start is not None:
            self.add(lane, name, start, self.device.mark())

    def add(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Record that something ran from the mark `start` to the mark `end`."""
        span = Span(lane, name, start, end)
        if self._is_in_step or lane != WAIT:  # what a checkpoint waits for belongs to no step
            self._spans.append(span)
        if (captured := self._captured) is not None:
            captured.append(span)

    def begin_step(self, step: int) -> None:
        """`step` begins, and the one before is over, if it was not."""
        is_over = not self._is_in_step
        self._end_step()
        self._is_in_step, self._step = True, step
        self._is_timing = self._is_timed(step)
        if is_over and self._is_timing and self._computed is not None:
            self.note(BETWEEN, "steps", self._computed)
        self._computed = None

    def end_computation(self) -> None:
        """All that the step computes was issued: what travels from here on, the next one reads."""
        if self.device.runs_ahead and self._is_in_step:
            self._end_step()
            self._is_timing = self._is_timed(self._step + 1)
            self._computed = self.mark()

    def _is_timed(self, step: int) -> bool:
        return step % self._every == 0 or self.is_capturing

    def _end_step(self) -> None:
        """The spans of timed steps that are over become times and are forgotten.

        Where the device runs ahead nothing is waited for: what it has not done yet is left.
        """
        if self._is_in_step:
            if self._spans and self._is_timed(self._step):
                self._folding.append(self._spans)
            self._spans = []  # with what a timed step has begun that ends after it
            self._is_in_step = False
        while self._folding and all(self.device.has_passed(s.end) for s in self._folding[0]):
            spans = self.in_seconds(self._folding.pop(0))
            self._times += replace(measure_comm(spans), steps=1)

    def pause(self) -> None:
        """Nothing is timed until the next step begins."""
        self._is_timing = self.is_capturing
        self._computed = None

    def take_times(self) -> CommTimes:
        """Return the times of what is over since the last call. The step is over, too."""
        self._end_step()
        if self.device.runs_ahead and self._computed is None:
            # On a CPU what the step has submitted may begin later.
            self.pause()
        times, self._times = self._times, CommTimes()
        return times

    @property
    def is_capturing(self) -> bool:
        """Whether every span is wanted, computation included."""
        return self._captured is not None

    def start_capture(self) -> None:
        """From now on keep every span."""
        self._captured, self._capture_start = [], self.device.mark()
        self._capture_began_s = time.time()
        self._is_timing = True

    @property
    def capture_began_s(self) -> float:
        """When the latest capture began, in seconds of the host's clock since the epoch: what the
        traces of several ranks have in common, as far as their clocks agree."""
        return self._capture_began_s

    def stop_capture(self) -> list[Span]:
        """Return the capture and the spans that ended in it, in seconds after the first start."""
        captured, self._captured = self._captured, None
        if captured is None:
            return []
        whole = Span(CAPTURE, "step", self._capture_start, self.device.mark())
        return self.in_seconds([whole, *captured])

    def in_seconds(self, spans: Sequence[Span]) -> list[Span]:
        """The same spans with start and end in seconds after the earliest start."""
        if not spans:
            return []
        between, origin = self.device.seconds_between, spans[0].start
        timed = [
            span._replace(start=between(origin, span.start), end=between(origin, span.end))
            for span in spans
        ]
        first = min(span.start for span in timed)
        return [s._replace(start=s.start - first, end=s.end - first) for s in timed]


def union_s(spans: Iterable[Span]) -> float:
    """Seconds that at least one of `spans` (in seconds) covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted((span.start, span.end) for span in spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def measure_comm(spans: Sequence[Span]) -> CommTimes:
    """How long collectives were on their way and how long computation waited; in seconds. Between
    two steps it has waited while something was on its way."""
    busy = [span for span in spans if span.lane in LANES]
    between = [span for span in spans if span.lane == BETWEEN]
    waits = [span for span in spans if span.lane == WAIT]
    busy_s = union_s(busy)
    idle_s = union_s(between) + busy_s - union_s([*between, *busy])  # what they share
    return CommTimes(busy_s, exposed_s=union_s(waits) + idle_s)


def chrome_trace(spans: Iterable[Span], rank: int, began_s: float = 0.0) -> dict[str, Any]:
    """Spans (in seconds) as a trace for chrome://tracing and Perfetto: one track per lane.

    began_s: the time of day at which the span of CAPTURE begins, see Timeline.capture_began_s.
    """
    tracks = {lane: track for track, lane in enumerate((CAPTURE, COMPUTE, WAIT, BETWEEN, *LANES))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    for lane, track in tracks.items():
        where = {"ph": "M", "pid": rank, "tid": track}
        events.append({**where, "name": "thread_name", "args": {"name": lane}})
        events.append({**where, "name": "thread_sort_index", "args": {"sort_index": track}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": rank,
                "tid": tracks[span.lane],
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
            }
        )
    other = {"rank": rank, "began_s": began_s}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


@contextmanager
def captured_trace(timeline: Timeline, path: Path, rank: int = 0) -> Generator[None]:
    """Write what happens inside as a trace to `path`, also where it fails."""
    timeline.start_capture()
    try:
        yield
    finally:
        stop_trace(timeline, path, rank)


def stop_trace(timeline: Timeline, path: Path, rank: int) -> None:
    """End the capture of `timeline` and write it. Raises OSError."""
    spans = timeline.stop_capture()
    path.write_text(json.dumps(chrome_trace(spans, rank, timeline.capture_began_s)))
