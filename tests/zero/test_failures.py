# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Law 7: what goes wrong in a collective is raised by name, at once or within the time limit, on
the main thread, in every schedule; nothing hangs and no thread is left.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megatron_asynchzp.engine.comm.timeline import LANES
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from scripts.testbed.ranks import observe_ranks, run_ranks
from tests.support.engine import EngineTrainer, build_toy
from tests.support.selection import slow_unless

# Far more than it takes on a busy machine, far less than the limits that must not be waited for.
SOON_S = 40.0
LONG_LIMIT_S = 300.0
NUM_STEPS = 4


class Seen(NamedTuple):
    """What a rank met when it trained."""

    message: str
    later: list[str]  # calls after the failure that did not raise the very same one
    threads: list[str]  # of ours, alive when all was closed
    failed_after_s: float  # since the step before the failure was complete
    closed_after_s: float


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "asynchzp" in thread.name]


def train_until_failure(
    kind: str, sizes: tuple, limit_s: float, prepare: Callable[[EngineTrainer, int], None]
) -> Seen:
    """`prepare` is called before each step; a later one must end in a CollectiveFailure."""
    schedule = ScheduleConfig(kind, prefetch_depth=2, time_limit_s=limit_s)
    trainer = EngineTrainer(build_toy(), sizes, schedule=schedule)
    driver, tasks = trainer.runtime.driver, []
    submit = driver.submit
    driver.submit = lambda task: (tasks.append(submit(task)), tasks[-1])[1]
    if kind == "threaded":
        assert len(own_threads()) == len(LANES)  # so that an empty list of them means something
    start_s = time.monotonic()
    try:
        for step in range(NUM_STEPS):
            prepare(trainer, step)
            start_s = time.monotonic()
            trainer.local_step(step, 2)
    except CollectiveFailure as error:
        failure = error
    else:
        raise AssertionError("nothing failed")
    failed_s = time.monotonic() - start_s
    later = {
        "submit": lambda: submit(tasks[0]),
        "wait for the first task": tasks[0].wait,
        "wait for the last task": tasks[-1].wait,
        "train": lambda: trainer.local_step(NUM_STEPS, 1),
        "close": trainer.runtime.close,
    }
    start_s = time.monotonic()
    others = [name for name, call in later.items() if raised_by(call) is not failure]
    return Seen(str(failure), others, own_threads(), failed_s, time.monotonic() - start_s)


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def assert_named(seen: Seen) -> None:
    """One line with operation, unit, ranks and step; nothing waited for, no thread left."""
    operations = "|".join(LANES.values())
    units = r"(embedding|blocks\.\d|output|root|norm|all units)"
    over = r"over ranks [\d, to.]+ in step \d+ "
    assert re.match(rf"({operations}) of {units}\S* {over}", seen.message)
    assert "\n" not in seen.message and len(seen.message) < 500
    assert seen.later == [] and seen.threads == []
    assert seen.failed_after_s < SOON_S and seen.closed_after_s < SOON_S


# --- an exception in a task --------------------------------------------------------------------

STEPS_OF = {
    "gather": "unshard_steps",
    "reduce": "reduce_steps",
    "grad-sync": "sync_grad_steps",
    "param-sync": "sync_param_steps",
}


def fail_in_task(kind: str, sizes: tuple, lane: str) -> Seen:
    def broken(*_: object) -> Iterator:
        raise ValueError("a bug\nof two lines")
        yield

    def prepare(trainer: EngineTrainer, step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            (unit,) = [unit for unit in trainer.runtime.units if unit.name == "blocks.1"]
            setattr(unit, STEPS_OF[lane], broken)

    return train_until_failure(kind, sizes, LONG_LIMIT_S, prepare)


SIZES_OF = dict.fromkeys(("gather", "reduce"), (2, 2, 2))
SIZES_OF |= dict.fromkeys(("grad-sync", "param-sync"), (1, 1, 2))


@pytest.mark.parametrize(
    "kind, lane",
    [
        slow_unless(kind == "threaded" or lane == "gather", kind, lane)
        for kind in SCHEDULES
        for lane in STEPS_OF
    ],
)
def test_an_exception_in_a_task_reaches_the_main_thread_by_name_and_so_does_its_peer_s_loss(
    kind, lane
):
    seen = observe_ranks(fail_in_task, 2, kind, SIZES_OF[lane], lane, num_survivors=2)
    assert sorted(seen) == [0, 1]
    for rank in seen:
        assert_named(seen[rank])
    pattern = (
        rf"{LANES[lane]} of blocks.1 over ranks 0, 1 in step [23] failed: ValueError a bug of "
    )
    assert re.match(pattern, seen[1].message), seen[1].message


# --- a peer that dies, a peer that hangs -------------------------------------------------------


def lose_peer(kind: str, where: str, how: str, limit_s: float) -> Seen:
    """Rank 1 dies or stops in the middle of step 2, counted from 0."""

    def end(*_: object) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)

    def prepare(trainer: EngineTrainer, step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            block = trainer.model.blocks[1]
            if where == "forward":
                block.register_forward_hook(end)
            else:
                block.up.weight.register_hook(end)

    return train_until_failure(kind, (2, 2, 4), limit_s, prepare)


@pytest.mark.parametrize(
    "kind, where",
    [
        slow_unless(kind == "threaded" and where == "forward", kind, where)
        for kind in SCHEDULES
        for where in ("forward", "backward")
    ],
)
def test_when_a_peer_dies_the_others_end_by_name_long_before_the_time_limit(kind, where):
    seen = observe_ranks(lose_peer, 4, kind, where, "exit", LONG_LIMIT_S, num_survivors=3)
    assert sorted(seen) == [0, 2, 3]
    for rank in seen:
        assert_named(seen[rank])
        # Parameter shards of the step before may still have been on their way.
        assert re.search(" in step [23] ", seen[rank].message)


@pytest.mark.parametrize("kind", [slow_unless(kind == "threaded", kind) for kind in SCHEDULES])
def test_when_a_peer_hangs_the_others_end_by_name_within_the_time_limit(kind):
    seen = observe_ranks(lose_peer, 4, kind, "backward", "stop", 2.0, num_survivors=3)
    assert sorted(seen) == [0, 2, 3]
    for rank in seen:
        assert_named(seen[rank])


# --- the ordinary end --------------------------------------------------------------------------


def count_threads() -> dict[str, tuple[int, int]]:
    """Threads while it trains and after the end, by schedule."""
    counts = {}
    for kind in SCHEDULES:
        trainer = EngineTrainer(build_toy(), (1, 2, 2), schedule=ScheduleConfig(kind))
        trainer.step(0, 1)
        during = len(own_threads())
        trainer.runtime.close()
        counts[kind] = during, len(own_threads())
    return counts


def test_only_the_threaded_schedule_has_threads_and_none_is_alive_after_detach():
    for counts in run_ranks(count_threads, 2):
        assert counts == {"inline": (0, 0), "main-thread": (0, 0), "threaded": (len(LANES), 0)}


def fail_after_close() -> str:
    trainer = EngineTrainer(build_toy(), (2, 2, 2))
    trainer.step(0, 1)
    trainer.runtime.close()
    return str(raised_by(lambda: trainer.step(1, 1)))


def test_training_on_after_the_end_is_an_error_and_not_a_hang():
    for message in run_ranks(fail_after_close, 2):
        assert "submitted after close(). Use the model before its close()." in message


# --- a collective that is never issued ---------------------------------------------------------


def stick_in_issue() -> Seen:
    """The thread that issues does not come back, as in a communicator that cannot connect."""

    def stuck(*_: object) -> Iterator:
        time.sleep(20)
        yield

    def prepare(trainer: EngineTrainer, step: int) -> None:
        if step == 2:
            (unit,) = [unit for unit in trainer.runtime.units if unit.name == "blocks.1"]
            unit.reduce_steps = stuck

    return train_until_failure("threaded", (2, 2, 2), 1.0, prepare)


def test_a_thread_that_never_comes_back_from_issuing_holds_no_other():
    seen = observe_ranks(stick_in_issue, 2, num_survivors=2)
    assert sorted(seen) == [0, 1]
    for met in seen.values():
        assert met.message.endswith("not issued and finished after 1 s")
        assert met.later == [] and met.failed_after_s < 15
        assert met.threads == ["asynchzp-reduce"]  # it cannot be ended; it is a daemon
