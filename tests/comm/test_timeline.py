# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is reported of a step's time: covered seconds, exposed ones, and the trace of its spans."""

import json
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import (
    CAPTURE,
    COMPUTE,
    LANES,
    WAIT,
    CommTimes,
    Span,
    Timeline,
    captured_trace,
    chrome_trace,
    measure_comm,
)
from tests.support.recording_device import RecordingDevice

TICK_S = 0.5  # spans of whole halves: sums are exact


class TickingDevice(RecordingDevice):
    """A CPU whose clock moves by one tick each time it is read."""

    runs_ahead = False

    ticks = 0

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def seconds_between(self, start: int, end: int) -> float:
        return TICK_S * (end - start)


@st.composite
def spans(draw, lanes=(COMPUTE, WAIT, CAPTURE, *LANES)) -> list[Span]:
    """Up to 12 spans within [0, 40) ticks, in seconds."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        start = draw(st.integers(0, 30))
        end = start + draw(st.integers(0, 9))
        lane, name = draw(st.sampled_from(lanes)), draw(st.sampled_from("uvw"))
        found.append(Span(lane, name, TICK_S * start, TICK_S * end))
    return found


def covered_ticks(among: list[Span]) -> set[int]:
    """The definition, tick by tick."""
    return {
        tick for span in among for tick in range(int(span.start / TICK_S), int(span.end / TICK_S))
    }


@given(spans(), spans(lanes=tuple(LANES)))
def test_busy_counts_collectives_exposed_counts_waiting_and_what_is_waited_out_is_no_overlap(
    some, collectives
):
    times = measure_comm(some)
    busy = [span for span in some if span.lane in LANES]
    waits = [span for span in some if span.lane == WAIT]
    assert times.busy_s == TICK_S * len(covered_ticks(busy))
    assert times.exposed_s == TICK_S * len(covered_ticks(waits))
    assert (times.overlap is None) == (times.busy_s == 0.0)
    assert 0.0 <= (times.overlap or 0.0) <= 1.0
    if covered_ticks(collectives):
        waited = [span._replace(lane=WAIT) for span in collectives]
        assert measure_comm([*collectives, *waited]).overlap == 0.0
        assert measure_comm(collectives).overlap == 1.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_the_exposed_time_of_a_step_is_what_it_waited_for_between_its_begin_and_its_report(steps):
    """Also where a checkpoint, or the start of the run, waits between two steps."""
    device = TickingDevice()
    timeline = Timeline(device)

    def wait(times: int) -> None:
        for _ in range(times):
            timeline.note(WAIT, "u", timeline.mark())

    for step, (waits_before, waits_within) in enumerate(steps, 1):
        wait(waits_before)
        timeline.begin_step(step)
        began = device.ticks
        wait(waits_within)
        times, lasted_s = timeline.pop_times(), TICK_S * (device.ticks - began)
        assert times.exposed_s == TICK_S * waits_within <= lasted_s
        assert times.steps == (waits_within > 0)


class LateDevice(TickingDevice):
    """A device that runs ahead: nothing has happened before the test lets it."""

    runs_ahead = True
    has_caught_up = False

    def has_passed(self, event) -> bool:
        return self.has_caught_up


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_a_device_that_runs_ahead_is_timed_in_one_step_of_so_many_and_never_in_evaluation(every):
    device = LateDevice()
    device.has_caught_up = True
    timeline, timed = Timeline(device, every), []
    for step in range(1, 31):
        timeline.begin_step(step)
        timeline.note("gather", "u", timeline.mark())
        if timeline.pop_times().steps:
            timed.append(step)
        assert timeline.mark() is None  # until the next step begins
    # Those whose log line is printed.
    assert timed == [step for step in range(1, 31) if step % every == 0]


def test_what_a_timed_step_begins_and_a_later_one_ends_is_no_step_of_its_own():
    device = LateDevice()
    device.has_caught_up = True
    timeline, begun = Timeline(device, 2), None
    for step in range(1, 7):
        timeline.begin_step(step)
        timeline.note("param-sync", "u", begun)
        timeline.note("gather", "u", timeline.mark())
        begun = timeline.mark()
        timeline.end_computation()
    assert timeline.pop_times().steps == 3


def test_times_are_folded_when_the_device_has_caught_up_and_not_waited_for():
    device = LateDevice()
    timeline = Timeline(device)
    for step in range(1, 6):
        timeline.begin_step(step)
        timeline.note("gather", "u", timeline.mark())
        assert timeline.pop_times().steps == 0
    device.has_caught_up = True
    assert timeline.pop_times().steps == 5


def test_an_evaluation_is_not_timed():
    for device in (TickingDevice(), LateDevice()):
        timeline = Timeline(device)
        timeline.begin_step(1)
        timeline.pause()
        assert timeline.mark() is None


def test_however_many_steps_are_run_the_spans_of_one_of_them_are_kept():
    class Name(str):
        """A string that can be watched for."""

    timeline, names = Timeline(TickingDevice()), weakref.WeakSet()
    for step in range(50):
        timeline.begin_step(step)
        for index in range(7):
            name = Name(f"u{step} {index}")
            names.add(name)
            timeline.add("gather", name, 0, 1)
        del name
        assert len(names) == 7


def test_a_step_that_several_model_chunks_begin_is_folded_once():
    driver = Driver(Timeline(TickingDevice()))
    for step in range(1, 4):
        for _ in range(3):
            driver.begin_step(step)
        driver.timeline.add("gather", "u", 0, step)
    assert driver.timeline.pop_times() == CommTimes((1 + 2 + 3) * TICK_S, 0.0, steps=3)


def test_a_report_is_per_step_also_of_a_run_that_goes_on_from_thousands():
    driver = Driver(Timeline(TickingDevice()))
    for step in (7001, 7002):
        for _ in range(2):  # model chunks
            driver.begin_step(step)
        driver.counts["gather"] += 6
    assert driver.take_report().gathers_per_step == 6
    driver.begin_step(7003)
    driver.counts["gather"] += 5
    assert driver.take_report().gathers_per_step == 5


def assert_valid(trace: dict, rank: int) -> None:
    """What chrome://tracing and Perfetto need to show every event on a named track."""
    assert json.loads(json.dumps(trace)) == trace
    named = set()
    for event in trace["traceEvents"]:
        assert event["pid"] == rank
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add((event["tid"], event["args"]["name"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert (event["tid"], event["cat"]) in named
    assert len({tid for tid, _ in named}) == len(named)


@given(spans(), st.integers(0, 9))
def test_a_chrome_trace_has_every_span_once_on_the_named_track_of_its_lane(some, rank):
    trace = chrome_trace(some, rank)
    assert_valid(trace, rank)
    shown = [
        Span(event["cat"], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]
    assert shown == some


class FinishedWork:
    def wait(self, *limit) -> None: ...


def submit_one(driver: Driver) -> None:
    def start():
        yield FinishedWork()

    driver.submit(Task("gather", "u0", (), start)).wait()


def test_the_tasks_of_a_captured_trace_are_in_its_file_also_where_the_step_fails(tmp_path):
    driver = Driver(Timeline(TickingDevice()))
    submit_one(driver)
    path = tmp_path / "one.json"
    with pytest.raises(ZeroDivisionError), captured_trace(driver.timeline, path, rank=3):
        submit_one(driver)
        raise ZeroDivisionError
    submit_one(driver)
    trace = json.loads(path.read_text())
    assert_valid(trace, rank=3)
    shown = [(event["cat"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert shown == [(CAPTURE, "step"), ("gather", "u0"), (WAIT, "gather u0")]
    assert not driver.timeline.is_capturing
