# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Streams and events, or threads and queues, order every pair of accesses to the same memory,
whatever a step does and however late a thread is; and the detector that shows it sees each order
that is taken away.
"""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.comm.timeline import LANES
from megatron_asynchzp.engine.schedule import ScheduleConfig
from tests.support.engine import cut_sizes, nested_sizes
from tests.support.recording_device import RecordingHost
from tests.support.scheduler_program import WORLD_SIZE, Program, Step, UnitShape, execute
from tests.support.selection import slow_unless

DRAWN = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
few_and_many = pytest.mark.parametrize("num_programs", [12, slow_unless(False, 200)])
THREE = (UnitShape(),) * 3


@st.composite
def programs(draw, kinds=("main-thread",)) -> Program:
    numel, is_trained = (
        st.sampled_from((24, 24, 24, 600, 1500)),
        st.sampled_from((True,) * 4 + (False,)),
    )
    units = draw(st.lists(st.builds(UnitShape, numel, is_trained), min_size=1, max_size=5))
    index = st.sampled_from(range(len(units)))
    step = st.builds(
        Step,
        micro_batches=st.integers(1, 3),
        skipped=st.just(frozenset()) | st.frozensets(index, max_size=2),
        warm_up=st.integers(0, 2),
        recomputes=st.booleans(),
        root=st.none() | index,
        evaluates=st.booleans(),
        is_begun_again=st.booleans(),
        is_applied=st.sampled_from((True, True, False)),
        is_clipped=st.booleans(),
    )
    config = st.builds(
        ScheduleConfig,
        st.sampled_from(kinds),
        prefetch_depth=st.integers(0, 4),
        grad_slot_nbytes=st.sampled_from((1, 4096, 2**20)),
    )
    first, *rest = draw(st.lists(step, min_size=1, max_size=4))
    # Without a record a step that uses nothing is refused.
    first = replace(first, skipped=first.skipped - {0})
    return Program(
        tuple(units),
        (first, *rest),
        draw(config),
        draw(st.sampled_from(nested_sizes(WORLD_SIZE) + cut_sizes(WORLD_SIZE))),
        draw(st.integers(0, WORLD_SIZE - 1)),
        draw(st.sampled_from((torch.bfloat16, torch.float32))),
        draw(st.sampled_from((None, False, True))),
        draw(st.sampled_from((0.0, 0.3, 1.0))),
        draw(st.sampled_from((torch.float32, torch.bfloat16))),
    )


def skip(*indices: int, **more) -> Step:
    return Step(skipped=frozenset(indices), **more)


TWO_AHEAD, NO_PREFETCH = ScheduleConfig(prefetch_depth=2), ScheduleConfig(prefetch_depth=0)
# Each of these was once a race. The first gather did not wait for what its memory was used for
# before (worst where memory grows: the computation before it has not run yet); the optimizer did
# not wait for the parameter sync of a unit that its step had not used, nor, in fp32, for a gather
# that a step of fewer micro-batches had no use for; after join_param_syncs gathers waited for the
# optimizer but no longer for the syncs. An update within backward has the same readers to wait for.
MEMORY_GROWS = Program(THREE, (Step(root=0), Step(root=0)), NO_PREFETCH, memory=0.0)
A_UNIT_IS_SKIPPED = Program(THREE, (Step(), skip(2), Step()), NO_PREFETCH, dtype=torch.float32)
MICRO_BATCHES_VARY = Program(THREE, (Step(2), Step(1), Step(3)), TWO_AHEAD, dtype=torch.float32)
NOTHING_IS_USED = Program(THREE, (Step(2), skip(0, 1, 2), skip(0, 1, 2), Step(1)), TWO_AHEAD)
A_SYNC_IS_JOINED = Program(
    THREE, (Step(), skip(2, is_applied=False), Step(root=2)), NO_PREFETCH, (2, 1, 4)
)

# Without streams the main-thread schedule waited for the last reduction of a unit only: a gradient
# without the micro-batches before, where there was memory for two reductions of one unit. There is
# where a step leaves a large unit out.
TWO_REDUCTIONS_IN_FLIGHT = Program(
    (UnitShape(), UnitShape(), UnitShape(600)),
    (Step(), skip(2, micro_batches=2)),
    ScheduleConfig("main-thread", 0),
    (1, 2, 2),
    memory=0.0,
)
SENT_EARLY = [
    replace(program, sends_early=True)
    for program in (A_UNIT_IS_SKIPPED, MICRO_BATCHES_VARY, NOTHING_IS_USED)
]


@few_and_many
def test_every_two_conflicting_accesses_of_streams_are_ordered(num_programs):
    @settings(DRAWN, max_examples=num_programs)
    @given(programs())
    @example(SENT_EARLY[0])
    @example(SENT_EARLY[1])
    @example(SENT_EARLY[2])
    @example(NOTHING_IS_USED)
    @example(MEMORY_GROWS)
    @example(A_UNIT_IS_SKIPPED)
    @example(MICRO_BATCHES_VARY)
    @example(A_SYNC_IS_JOINED)
    def holds(program):
        done = execute(program)
        assert done.device.num_accesses > 0
        assert done.races == []
        assert done.scheduler.num_places_in_use() == 0

    holds()


@few_and_many
def test_every_two_conflicting_accesses_of_threads_on_a_cpu_are_ordered(num_programs):
    @settings(DRAWN, max_examples=num_programs)
    @given(programs(kinds=("main-thread", "threaded")))
    @example(A_UNIT_IS_SKIPPED)
    @example(TWO_REDUCTIONS_IN_FLIGHT)
    def holds(program):
        done = execute(program, new_device=RecordingHost)
        assert done.device.num_accesses > 0
        assert done.races == []
        assert done.scheduler.num_places_in_use() == 0

    holds()


@few_and_many
def test_without_streams_each_lane_and_each_group_has_the_order_of_submission(num_programs):
    @settings(DRAWN, max_examples=num_programs)
    @given(programs(kinds=("threaded",)))
    def holds(program):
        first, second = (execute(program, seed, new_device=RecordingHost) for seed in (1, 2))
        assert first.submitted == second.submitted
        for lane in LANES:
            submitted = [entry for entry in first.submitted if entry[0] == lane]
            for done in (first, second):
                assert [entry for entry in done.issued if entry[0] == lane] == submitted
        for group in {collective.group for collective in first.device.collectives}:
            over_group = [
                [collective for collective in done.device.collectives if collective.group == group]
                for done in (first, second)
            ]
            assert over_group[0] == over_group[1]

    holds()


# ---- the detector sees faults

VARIED = [
    replace(program, sizes=sizes, dtype=dtype, config=config, memory=memory)
    for program in (
        Program(THREE, (Step(2), Step(1, root=1), Step(3), skip(2), Step(2))),
        Program((UnitShape(), UnitShape(1500), UnitShape()), (Step(), skip(0, 1), Step(2))),
    )
    for sizes in ((2, 4, 8), (4, 1, 4))
    for dtype in (torch.float32, torch.bfloat16)
    for config, memory in ((replace(TWO_AHEAD, grad_slot_nbytes=1), 1.0), (NO_PREFETCH, 0.0))
]


def has_race(victim: str = "", action: str = "", **mutant) -> bool:
    """Whether a program has one over that memory, with that access; up to the first that has."""
    races = (race for program in VARIED for race in execute(program, **mutant).races)
    return any(victim in race and action in race for race in races)


def test_without_a_fault_the_programs_for_the_detector_have_no_race():
    assert not has_race()


@pytest.mark.parametrize(
    "lane, edge, victim",
    [
        ("gather", "ready", "param place"),
        ("gather", "after", "model_param"),
        ("reduce", "ready", "grad place"),
        ("grad-sync", "after", "main_grad"),
        ("grad-sync", "ready", "main_grad"),
        ("param-sync", "ready", "model_param"),
    ],
)
def test_a_task_that_does_not_wait_for_what_it_needs_is_seen(lane, edge, victim, monkeypatch):
    honest = Driver.submit

    def submit_without_edge(driver: Driver, task: Task) -> Task:
        if task.lane == lane:
            setattr(task, edge, ())  # ready: events that the task waits for; after: other tasks
        return honest(driver, task)

    monkeypatch.setattr(Driver, "submit", submit_without_edge)
    assert has_race(victim)


@pytest.mark.parametrize("lane", ["gather", "reduce", "grad-sync", "param-sync"])
def test_computation_that_does_not_wait_for_a_task_is_seen(lane, monkeypatch):
    honest = Task.wait
    monkeypatch.setattr(Task, "wait", lambda task: task.lane == lane or honest(task))
    assert has_race()


class TooEarly(RecordingHost):
    """A CPU on which the result of a collective is taken before it is there."""

    def wait_work(self, work, limit_s, is_over=None) -> None:
        pass


def test_a_thread_that_does_not_wait_is_seen(monkeypatch):
    assert not has_race(new_device=RecordingHost)
    assert has_race(new_device=TooEarly)
    monkeypatch.setattr(Task, "wait", lambda task: None)
    assert has_race(new_device=RecordingHost)
