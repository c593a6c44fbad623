# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records spans of computation, of collectives and of waiting on one clock; writes traces."""

import json
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_asynchzp.engine.device import Device

LANES = {
    "gather": "all-gather of the parameters",
    "reduce": "reduce-scatter of the gradients",
    "grad-sync": "reduction of the gradient shard",
    "param-sync": "gather of the updated parameter shard",
    "matrices": "exchange of the matrices",
    "order": "comparison of the order of collectives",
}
"""Kinds of operation and their names in messages. A lane has a stream and completes its tasks in
order."""

COMPUTE, WAIT, BETWEEN, CAPTURE = "compute", "wait", "between", "capture"
"""Lanes of the main thread: computation, waits, the time from the end of a step's computation to
the begin of the next step, and the duration of a capture."""


class Span(NamedTuple):
    """The time between two marks of the device."""

    lane: str
    name: str
    start: Any
    end: Any


_NOT_RECORDED = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    # Without a profiler this takes a fifteenth of the time of record_function, for each task.
    is_recorded = torch.autograd._profiler_enabled()  # pyright: ignore
    return torch.profiler.record_function(f"asynchzp: {name}") if is_recorded else _NOT_RECORDED


@dataclass(frozen=True)
class CommTimes:
    """The time of communication in some steps."""

    busy_s: float = 0.0  # during which at least one collective was on its way
    exposed_s: float = 0.0  # for which computation waited
    steps: int = 0  # timed steps

    def __add__(self, other: "CommTimes") -> "CommTimes":
        return CommTimes(
            self.busy_s + other.busy_s, self.exposed_s + other.exposed_s, self.steps + other.steps
        )

    @property
    def overlap(self) -> float | None:
        """The part of communication that computation did not wait for, 0 to 1; None without any."""
        return max(0.0, 1.0 - self.exposed_s / self.busy_s) if self.busy_s else None


class Timeline:
    """Records spans. Any thread may call `add` (list.append is atomic), the main thread the rest.

    Only training steps are timed: all on a CPU, one in `every` on a device that runs ahead, where a
    mark is an event in a stream. A device's step is timed from the end of the last step's
    computation, to include the sends of updated parameters: if the host waits for the device
    between the steps, no later wait shows their time.
    """

    def __init__(self, device: Device, every: int = 1):
        self.device = device
        self._every = every if device.runs_ahead else 1
        self._is_timing, self._is_in_step = False, False
        self._step = 0
        self._computed: Any = None  # mark at the end of the last step's computation
        self._spans: list[Span] = []
        self._folding: list[list[Span]] = []
        self._captured: list[Span] | None = None
        self._capture_start: Any = None
        # The begin of the latest capture, in seconds since the epoch by the host's clock. It aligns
        # the traces of several ranks, as far as their clocks agree.
        self.capture_began_s = 0.0
        self._times = CommTimes()

    def mark(self) -> Any:
        """Return a mark of now on the current stream; None if nothing is recorded."""
        return self.device.mark() if self._is_timing else None

    def note(self, lane: str, name: str, start: Any) -> None:
        if start is not None:
            self.add(lane, name, start, self.device.mark())

    def add(self, lane: str, name: str, start: Any, end: Any) -> None:
        span = Span(lane, name, start, end)
        if self._is_in_step or lane != WAIT:  # waits of a checkpoint belong to no step
            self._spans.append(span)
        if (captured := self._captured) is not None:
            captured.append(span)

    def begin_step(self, step: int) -> None:
        is_over = not self._is_in_step
        self._end_step()
        self._is_in_step, self._step = True, step
        self._is_timing = self._is_timed(step)
        if is_over and self._is_timing and self._computed is not None:
            self.note(BETWEEN, "steps", self._computed)
        self._computed = None

    def end_computation(self) -> None:
        """Mark that all computation of the step was issued: later traffic is for the next step."""
        if self.device.runs_ahead and self._is_in_step:
            self._end_step()
            self._is_timing = self._is_timed(self._step + 1)
            self._computed = self.mark()

    def _is_timed(self, step: int) -> bool:
        return step % self._every == 0 or self.is_capturing

    def _end_step(self) -> None:
        """Fold the spans of timed steps that the device has finished into times."""
        if self._is_in_step:
            if self._spans and self._is_timed(self._step):
                self._folding.append(self._spans)
            self._spans = []  # drops spans that end after their step, too
            self._is_in_step = False
        while self._folding and all(self.device.has_passed(s.end) for s in self._folding[0]):
            spans = self.in_seconds(self._folding.pop(0))
            self._times += replace(measure_comm(spans), steps=1)

    def pause(self) -> None:
        self._is_timing = self.is_capturing
        self._computed = None

    def leave_step(self) -> None:
        """Time nothing of the current step, which a graph runs."""
        self._spans = []
        self._is_timing = self._is_in_step = False

    def pop_times(self) -> CommTimes:
        """Return and forget the times since the last call; the current step must be over."""
        self._end_step()
        if self.device.runs_ahead and self._computed is None:
            # On a CPU tasks of the step may begin later, and still count.
            self.pause()
        times, self._times = self._times, CommTimes()
        return times

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def start_capture(self) -> None:
        self._captured, self._capture_start = [], self.device.mark()
        self.capture_began_s = time.time()
        self._is_timing = True

    def stop_capture(self) -> list[Span]:
        """Return the capture and the spans that ended in it, in seconds after the first start."""
        captured, self._captured = self._captured, None
        if captured is None:
            return []
        whole = Span(CAPTURE, "step", self._capture_start, self.device.mark())
        return self.in_seconds([whole, *captured])

    def in_seconds(self, spans: Sequence[Span]) -> list[Span]:
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
    covered, reached = 0.0, float("-inf")
    for start, end in sorted((span.start, span.end) for span in spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def measure_comm(spans: Sequence[Span]) -> CommTimes:
    """Return the busy and exposed time of `spans` in seconds.

    Between two steps computation waits whenever a collective is on its way.
    """
    busy = [span for span in spans if span.lane in LANES]
    between = [span for span in spans if span.lane == BETWEEN]
    waits = [span for span in spans if span.lane == WAIT]
    busy_s = union_s(busy)
    idle_s = union_s(between) + busy_s - union_s([*between, *busy])  # their intersection
    return CommTimes(busy_s, exposed_s=union_s(waits) + idle_s)


def chrome_trace(spans: Iterable[Span], rank: int, began_s: float = 0.0) -> dict[str, Any]:
    """Return spans (in seconds) as a trace for chrome://tracing and Perfetto, a track per lane.

    `began_s` is Timeline.capture_began_s.
    """
    tracks = {lane: track for track, lane in enumerate((CAPTURE, COMPUTE, WAIT, BETWEEN, *LANES))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    for lane, track in tracks.items():
        head = {"ph": "M", "pid": rank, "tid": track}
        events.append({**head, "name": "thread_name", "args": {"name": lane}})
        events.append({**head, "name": "thread_sort_index", "args": {"sort_index": track}})
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
    origin = {"rank": rank, "began_s": began_s}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": origin}


@contextmanager
def captured_trace(timeline: Timeline, path: Path, rank: int = 0) -> Generator[None]:
    timeline.start_capture()
    try:
        yield
    finally:
        stop_trace(timeline, path, rank)


def stop_trace(timeline: Timeline, path: Path, rank: int) -> None:
    spans = timeline.stop_capture()
    path.write_text(json.dumps(chrome_trace(spans, rank, timeline.capture_began_s)))
