# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to some ranks: all of them know it at the same step, for one small collective."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import global_vars

from megatron_asynchzp.engine.device import CpuDevice
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.mcore.patches import process
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.mcore.process.stop_signal import StopSignal
from tests.support.world import on_ranks

CPU = torch.device("cpu")
# In each step, the ranks that get a signal in it.
STRUCK = [(), (2,), (), (0, 1), (0, 1, 2)]


def _answers() -> list[tuple[list[bool], int]]:
    """What this rank knows after each step, and how many collectives of the world that took."""
    handler, stop = SimpleNamespace(_signal_received=False), StopSignal(CpuDevice(), 60.0)
    global_vars._GLOBAL_SIGNAL_HANDLER = handler
    count, reduce = [0], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        return reduce(*args, **options)

    dist.all_reduce, found = counted, []
    try:
        for ranks in STRUCK:
            handler._signal_received = dist.get_rank() in ranks
            stop.share(CPU)
            found.append((stop.signals_received(), count[0]))
    finally:
        dist.all_reduce, global_vars._GLOBAL_SIGNAL_HANDLER = reduce, None
    return found


def test_all_ranks_know_of_a_signal_to_any_of_them_after_one_collective_a_step():
    expected = [([bool(ranks)], step) for step, ranks in enumerate(STRUCK, 1)]
    assert on_ranks(_answers, 3) == [expected] * 3


class _RunsAhead(CpuDevice):
    """Nothing has happened before somebody waits for it. waits: for which events."""

    def __init__(self):
        self.num_events, self.waits, self.answers = 0, [], True

    def record_event(self) -> Any:
        self.num_events += 1
        return self.num_events

    def synchronize(self, event: Any, limit_s: float) -> bool:
        self.waits.append(event)
        return self.answers


@pytest.fixture
def stop(monkeypatch) -> StopSignal:
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", SimpleNamespace(_signal_received=1))
    monkeypatch.setattr(dist, "all_reduce", lambda flag, operation: None)
    return StopSignal(_RunsAhead(), 60.0)


def test_a_step_shares_without_a_wait_and_the_answer_is_waited_for_once(stop):
    for step in (1, 2, 3):
        stop.share(CPU)
        assert stop._device.waits == list(range(1, step))
        assert stop.signals_received() == [True]
    assert stop._device.waits == [1, 2, 3]


def test_an_answer_that_does_not_come_is_a_failure(stop):
    stop.share(CPU)
    stop._device.answers = False
    with pytest.raises(CollectiveFailure, match="the signal to end failed: not finished after 60"):
        stop.signals_received()


def test_without_a_handler_no_collective_is_made(stop, monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", None)
    monkeypatch.setattr(dist, "all_reduce", None)
    stop.share(CPU)
    assert stop.signals_received() == [False]


def test_megatron_asks_the_agreed_signal_where_we_train_and_its_own_handler_elsewhere(monkeypatch):
    stock, ours = object(), object()
    current: list[Any] = [SimpleNamespace(stop_signal=ours)]
    monkeypatch.setattr(process.Communication, "current", lambda: current[0])
    patch = next(patch for patch in PATCHES if patch.attribute == "get_signal_handler")
    get = patch.make(lambda: stock)
    assert get() is ours
    current[0] = None
    assert get() is stock
