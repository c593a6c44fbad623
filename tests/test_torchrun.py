# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The status of `asynchzp launch` after a SIGTERM is that of its ranks, a rendezvous that is gone
does not hold it, and it says where it waits for other nodes."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_asynchzp.commands import torchrun
from scripts.testbed.ranks import free_port


class Ended:
    """A rank's process that has ended."""

    def __init__(self, status: int):
        self._status = status

    def poll(self) -> int:
        return self._status


@pytest.mark.parametrize(
    "statuses, number, status",
    [
        ((0, 0), signal.SIGTERM, 0),
        ((0, 1), signal.SIGTERM, None),
        ((0, -9), signal.SIGTERM, None),
        ((), signal.SIGTERM, None),
        ((0, 0), signal.SIGINT, None),
    ],
)
def test_it_is_0_where_sigterm_ended_every_rank_well(monkeypatch, statuses, number, status):
    def end(argv):
        raise torchrun.SignalException("", number)

    ranks = {place: Ended(one) for place, one in enumerate(statuses)}
    monkeypatch.setattr(torchrun, "watch_ranks", lambda: ranks)
    monkeypatch.setattr(torchrun, "watch_rendezvous", lambda are_gone: None)
    monkeypatch.setattr(torchrun.run, "main", end)
    if status is None:
        with pytest.raises(torchrun.SignalException):
            torchrun.main(["script.py"])
    else:
        assert torchrun.main(["script.py"]) == status


@pytest.mark.parametrize("nodes, kept_for", [("1", None), ("2", 32), ("1:4", 64)])
def test_after_a_failed_rank_the_store_stays_for_the_ranks_of_other_nodes(
    monkeypatch, nodes, kept_for
):
    seen = []

    def fail(argv):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        asking = dist.TCPStore("127.0.0.1", store.port)
        clock = SimpleNamespace(sleep=lambda seconds: seen.append((seconds, asking.add("a", 1))))
        monkeypatch.setattr(torchrun, "time", clock)
        raise torchrun.ChildFailedError("", {0: ProcessFailure(0, 1, 1, "")})

    monkeypatch.setattr(torchrun, "watch_meeting", lambda ranks, where: None)
    monkeypatch.setattr(torchrun, "watch_ranks", dict)
    monkeypatch.setattr(torchrun, "watch_rendezvous", lambda are_gone: None)
    monkeypatch.setattr(torchrun.run, "main", fail)
    with pytest.raises(torchrun.ChildFailedError):
        torchrun.main(["--nnodes", nodes, "script.py"])
    assert seen == ([(torchrun.lasts_s(kept_for), 1)] if kept_for else [])


@pytest.mark.parametrize(
    "options, places",
    [
        ("--master-addr a", []),
        ("--nnodes 2 --master-addr a --master-port 7", ["a:7"]),
        ("--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint b:8", ["b:8"]),
    ],
)
def test_a_launch_over_several_nodes_watches_the_place_where_they_meet(
    monkeypatch, options, places
):
    watched = []
    monkeypatch.setattr(torchrun, "watch_meeting", lambda ranks, place: watched.append(place))
    monkeypatch.setattr(torchrun, "watch_ranks", dict)
    monkeypatch.setattr(torchrun, "watch_rendezvous", lambda are_gone: None)
    monkeypatch.setattr(torchrun.run, "main", lambda argv: None)
    assert torchrun.main([*options.split(), "script.py"]) == 0
    assert watched == places


def test_of_each_place_the_process_counts_that_was_started_last(monkeypatch):
    """As torch starts it, with its own class."""
    kind = torchrun.subprocess_handler.SubprocessHandler
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    started = torchrun.watch_ranks()
    for status in (3, 0):  # the second is a restart
        words = ("-c", f"raise SystemExit({status})")
        kind(sys.executable, words, {}, None, None, 0, None).proc.wait()
    assert [one.poll() for one in started.values()] == [0]


_HELD = """
import threading, time
from megatron_asynchzp.commands import torchrun
torchrun._HELD_S = 0.2
gone = threading.Event()
def end():
    print("the ranks have ended", flush=True)
    gone.set()
kind = torchrun.c10d_rendezvous_backend.C10dRendezvousBackend
kind._call_store = lambda backend, operation: time.sleep(operation)
torchrun.watch_rendezvous(gone.is_set)
kind._call_store(None, 0.1)
threading.Timer(1.0, end).start()
kind._call_store(None, 60.0)
"""


def test_where_the_store_of_the_rendezvous_does_not_answer_it_ends_when_its_ranks_have():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _HELD], capture_output=True, text=True, timeout=50
    )
    assert (ended.returncode, ended.stdout) == (1, "the ranks have ended\n")
    line = "megatron_asynchzp: no rank of this node is left, and the rendezvous does not answer: "
    assert ended.stderr.startswith(line) and ended.stderr.count("\n") == 1


_ALONE = """
import os, sys, threading
from megatron_asynchzp.commands import torchrun
torchrun._MISSED_AFTER_S, torchrun._MISSED_AGAIN_S = 0.2, 0.3
threading.Timer(3.0, os._exit, [3]).start()
torchrun.main([*sys.argv[1:], "--node-rank", "1", "--master-addr", "127.0.0.1", "script.py"])
"""


def test_a_node_whose_first_node_does_not_come_says_now_and_then_where_it_waits():
    options = ["--nnodes", "2", "--master-port", str(port := free_port())]
    command = [sys.executable, "-W", "ignore", "-c", _ALONE, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    line = f"s for all nodes to meet at 127.0.0.1:{port}; is that the first node's address, "
    assert ended.returncode == 3 and ended.stderr.count(line) > 1
