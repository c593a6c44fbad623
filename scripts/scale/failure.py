# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a failure of a whole world: ranks that call each other at a real store, all at once."""

import multiprocessing
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_asynchzp.comm.timeline import LANES
from megatron_asynchzp.failure import roll_call
from megatron_asynchzp.failure.roll_call import RollCall
from scripts.scale.costs import Cost

MOST = 16_384  # callers: what one machine has threads and connections for
_GONE = 16  # ranks: two nodes
_IN_A_PROCESS = 128
_FORK = multiprocessing.get_context("fork")


class Storm(NamedTuple):
    """ranks: of the world. mb: that the store carries; store_s: its CPU; last_s: until the last
    line. heard: the part of the callers whose line names the ranks that are gone."""

    ranks: int
    mb: float
    store_s: float
    last_s: float
    heard: float


def measure_storm(ranks: int) -> Storm:
    """All ranks but a few call, each with a thread and a connection of its own."""
    callers = range(1, ranks - _GONE + 1)
    started, go, end, done = _FORK.Queue(), _FORK.Event(), _FORK.Event(), _FORK.Queue()
    server = _FORK.Process(target=_serve, args=(started, end), daemon=True)
    server.start()
    port, number = started.get(), -(-len(callers) // _IN_A_PROCESS)
    all_ = [
        _FORK.Process(
            target=_call, args=(port, callers[n::number], ranks, started, go, done), daemon=True
        )
        for n in range(number)
    ]
    for process in all_:
        process.start()
    for _ in all_:
        started.get()
    before_s = _cpu_s(server.pid)
    go.set()
    found = [done.get() for _ in all_]
    store_s = _cpu_s(server.pid) - before_s
    end.set()
    for process in (*all_, server):
        process.join()
    heard = sum(one["heard"] for one in found) / len(callers)
    nbytes = sum(one["nbytes"] for one in found)
    return Storm(ranks, nbytes / 1e6, store_s, max(one["last_s"] for one in found), heard)


def costs_of(ranks: int, storm: Storm) -> list[Cost]:
    """storm: of so many ranks, or of fewer."""
    more = ranks / storm.ranks
    last_s = storm.last_s if more == 1 else roll_call.lasts_s(ranks) + storm.store_s * more
    return [
        Cost("failure", "store: bytes", "MB", storm.mb * more, more == 1),
        Cost("failure", "store: CPU", "s", storm.store_s * more, more == 1),
        Cost("failure", "last rank's line", "s", last_s, more == 1),
    ]


class _Counted:
    """A connection to the store, and the bytes of keys and values that go over it."""

    def __init__(self, store: Any):
        self._store, self.nbytes = store, 0

    def __getattr__(self, name: str) -> Any:
        of_store = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            result = of_store(*args)
            texts = [one for one in (*args, result) if isinstance(one, str | bytes)]
            self.nbytes += sum(map(len, texts))
            return result

        return counted


def _serve(started: Any, end: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started.put(store.port)
    end.wait()


def _call(port: int, mine: range, ranks: int, started: Any, go: Any, done: Any) -> None:
    roll_call._LOOKS_EVERY_S = 600.0  # looks of all ranks would take one machine's cores
    threading.stack_size(1 << 17)
    first = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: _Counted(first.clone()), mine))
    submitted = Counter(dict.fromkeys(LANES, 4821))
    pairs = zip(stores, mine, strict=True)
    calls = [RollCall(store, rank, ranks, submitted, lambda _: None) for store, rank in pairs]
    started.put(None)
    go.wait()
    start = time.monotonic()
    for call in calls:
        call._is_asked.set()  # as `about` does, which one thread can call for all after that
    lines = [call.find_missing("gather", 4822, range(1, 9)) for call in calls]
    heard = sum(
        line.startswith(f"no answer from ranks 0, {ranks - _GONE + 1} to") for line in lines
    )
    last_s = time.monotonic() - start
    done.put({"heard": heard, "last_s": last_s, "nbytes": sum(one.nbytes for one in stores)})
    done.close()
    done.join_thread()
    os._exit(0)


def _cpu_s(process: int | None) -> float:
    with suppress(FileNotFoundError), open(f"/proc/{process}/stat") as file:
        used = file.read().rsplit(")", 1)[1].split()[11:13]
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
    return 0.0
