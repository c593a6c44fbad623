# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of one world on this machine and runs one function on all of them.

    run_ranks(check, 4)                                     # check(), on gloo
    cluster = Cluster(2, 2, named_profile("slow-between-nodes"))
    cluster.run(measure, settings, timeout_s=60)            # measure(network, settings), on fabric

The ranks are forked from a server process that has imported torch, and what `preload` names, once:
a world of 8 starts in about a second and shares the pages of those imports.
"""

import contextlib
import multiprocessing
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from scripts.testbed.profile import NetworkProfile

_CONTEXT = multiprocessing.get_context("forkserver")
_ALWAYS, _LAST = ("torch", "torch.distributed"), "scripts.testbed.frozen"
_CONTEXT.set_forkserver_preload([*_ALWAYS, _LAST])

_DIED = "died without a message"
_ENDED_FOR_ANOTHER = "ended because another rank had failed"
_RAISED_LINE = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")  # a traceback's last line
_LAST_WORDS_S = 3.0  # after one rank has failed the others may still report the same fault

# Each pair of ranks is connected over TCP. On a busy machine such a connection now and then breaks
# before the ranks have met ("connectFullMesh failed ... Connection closed by peer"), which is no
# fault of `fn`. Such a world is started again, with a new store. Once `fn` was called on any rank,
# nothing is repeated.
_MOST_STARTS = 3

# What a rank sends, with a text or a result.
_JOINED, _NOT_JOINED, _RAISED, _RETURNED = "joined", "not joined", "raised", "returned"


class RankFailure(RuntimeError):
    """A rank raised, died or took too long. `reason`: one line; the message: all tracebacks."""

    def __init__(self, errors: dict[int, str]):
        lines = [line for text in errors.values() for line in text.splitlines() if line.strip()]
        raised = [line for line in lines if _RAISED_LINE.match(line)] or lines
        # A rank that lost its peer raises FabricError; the peer's own error is the cause.
        self.reason = next((line for line in raised if "FabricError" not in line), raised[0])
        super().__init__("\n".join(f"--- rank {r} ---\n{t}" for r, t in sorted(errors.items())))


@dataclass(frozen=True)
class RankPlace:
    """One rank of a world. port: of the store on 127.0.0.1 at which the world meets."""

    rank: int
    world_size: int
    ranks_per_node: int
    port: int

    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank % self.ranks_per_node),
            "GROUP_RANK": str(self.rank // self.ranks_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
        }


Join = Callable[[RankPlace], tuple]
"""Makes the default process group of a rank; returns the first arguments of `fn`."""


def join_gloo(place: RankPlace) -> tuple[()]:
    _init_group("gloo", place, timeout_s=90)
    return ()


def join_fabric(profile: NetworkProfile, place: RankPlace) -> tuple[Any]:
    """The default group is on the modelled network; `fn` gets the Network."""
    from scripts.testbed import fabric

    network = fabric.register(profile)
    _init_group(fabric.BACKEND, place, timeout_s=60)
    return (network,)


def _init_group(backend: str, place: RankPlace, timeout_s: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.TCPStore("127.0.0.1", place.port, is_master=False),  # pyright: ignore[reportPrivateImportUsage]
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


# ---- what a caller uses


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout_s: float = 300.0,
    env: dict[str, str] | None = None,
    join: Join = join_gloo,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks and return their results in rank order.

    `fn`, `args` and the results must pickle (`fn` is a module-level function). The default
    process group is initialised on every rank before `fn` runs on any. `env` is set on every rank.

    Raises RankFailure when a rank raises, dies or exceeds `timeout_s` seconds; all ranks are
    killed then.
    """
    job = _Job(fn, args, env or {}, join)
    return _run_all(job, partial(_meeting_ranks, world_size, world_size), timeout_s)


def observe_ranks(
    fn: Callable, world_size: int, *args: Any, num_survivors: int, timeout_s: float = 90.0
) -> dict[int, Any]:
    """As `run_ranks` where ranks are to die or to hang: what the others returned, by rank.

    Returns when `num_survivors` ranks have, or all others have died; ranks that still run are
    killed then. Raises RankFailure where one raised, or where that takes longer than `timeout_s`.
    """
    job = _Job(fn, args, {}, join_gloo, ends_together=False)
    places = partial(_meeting_ranks, world_size, world_size)
    results, errors = _start_until_met(job, places, timeout_s, num_survivors)
    if faults := {rank: text for rank, text in errors.items() if text != _DIED}:
        raise RankFailure(faults)
    return results


@dataclass(frozen=True)
class Cluster:
    """nodes x ranks_per_node ranks on a network. `profile` gets the ranks of a node from here."""

    nodes: int
    ranks_per_node: int
    profile: NetworkProfile

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def run(
        self,
        fn: Callable,
        *args: Any,
        timeout_s: float,
        is_joined: bool = True,
        log: Path | None = Path(os.devnull),
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run `fn(network, *args)` on every rank, and return the results in their order.

        The default process group is the network. fn, args and results must pickle. `is_joined`:
        False runs every rank as a world of its own: the same load, no communication. `log`: file to
        which the output of the ranks is appended; None leaves it on the terminal. Whatever happens,
        no rank runs afterwards. Raises RankFailure.
        """
        profile = replace(self.profile, ranks_per_node=self.ranks_per_node)
        job = _Job(fn, args, env or {}, partial(join_fabric, profile), log)
        places = _meeting_ranks if is_joined else _lone_ranks
        return _run_all(job, partial(places, self.num_ranks, self.ranks_per_node), timeout_s)


def preload(modules: Sequence[str]) -> None:
    """Modules that the server of the ranks imports once. Before the first run of a process."""
    _CONTEXT.set_forkserver_preload([*_ALWAYS, *modules, _LAST])


def start_process(target: Callable, *args: Any) -> BaseProcess:
    """A process of the same server that calls `target(*args)` and joins no world."""
    process = _CONTEXT.Process(target=target, args=args)
    process.start()
    return process


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- where ranks meet: this process serves the stores, since a port that was only found free could
# be taken meanwhile


def new_store() -> Any:
    """A store on a port of its own, served by this process as long as the object lives."""
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


def _meeting_ranks(world_size: int, ranks_per_node: int) -> tuple[list[RankPlace], list[Any]]:
    """The places of one world, and its store."""
    store = new_store()
    places = [RankPlace(rank, world_size, ranks_per_node, store.port) for rank in range(world_size)]
    return places, [store]


def _lone_ranks(num_ranks: int, ranks_per_node: int) -> tuple[list[RankPlace], list[Any]]:
    """Worlds of one rank each, and their stores."""
    stores = [new_store() for _ in range(num_ranks)]
    return [RankPlace(0, 1, ranks_per_node, store.port) for store in stores], stores


# ---- on the ranks


@dataclass(frozen=True)
class _Job:
    """What every rank does. ends_together: whether all ranks are to reach the end."""

    fn: Callable
    args: tuple
    env: dict[str, str]
    join: Join
    log: Path | None = None
    ends_together: bool = True

    def main(self, place: RankPlace, parent: Connection) -> None:
        """The life of a rank."""
        if self.log is not None:
            with open(self.log, "ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        threading.Thread(target=end_with_parent, daemon=True).start()
        os.environ.update(place.environment() | self.env)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # several ranks share the cores
        failed_as = _NOT_JOINED
        try:
            first = self.join(place)
            parent.send((_JOINED, None))
            parent.recv()  # all ranks have joined
            failed_as = _RAISED
            result = self.fn(*first, *self.args)
            if self.ends_together:
                dist.barrier()
            _kill_children()
            parent.send((_RETURNED, result))
            if self.ends_together:
                _await_the_others(parent)
        except BaseException:  # SystemExit and KeyboardInterrupt too must reach the parent
            _kill_children()
            parent.send((failed_as, traceback.format_exc()))
        parent.close()
        os._exit(0)  # a peer may be gone already: no teardown that could wait for it


def _kill_children() -> None:
    for child in multiprocessing.active_children():  # such as Megatron's writers
        child.kill()


def _await_the_others(parent: Connection) -> None:
    """Wait until the starter, which has all results then, kills this rank.

    A rank that went at once would look lost to a peer that is not that far yet: NCCL's watchdog
    ends a process for it.
    """
    with contextlib.suppress(EOFError, OSError):
        parent.recv()


def end_with_parent() -> None:
    """The process that started the ranks was killed: end, instead of waiting for peers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ---- in the process that starts them


def _run_all(job: _Job, new_places: Callable, timeout_s: float) -> list[Any]:
    results, errors = _start_until_met(job, new_places, timeout_s)
    if errors:
        raise RankFailure(errors)
    return [results[index] for index in range(len(results))]


def _start_until_met(
    job: _Job, new_places: Callable, timeout_s: float, num_survivors: int | None = None
) -> tuple[dict[int, Any], dict[int, str]]:
    """What the ranks returned, and what became of those that did not, by rank.

    new_places: places and stores for one start; num_survivors: ranks that will return, where not
    all do.
    """
    for _ in range(_MOST_STARTS):
        places, stores = new_places()
        world = _World(job, len(places) if num_survivors is None else num_survivors)
        try:
            world.start(places)
            world.collect(timeout_s)
        finally:
            world.kill()
            del stores
        if world.has_met:
            break
    return world.results, world.errors


@dataclass
class _World:
    """The processes of one start, and the results that they have sent so far.

    `has_met`: False if a rank could not join, and so `fn` was called nowhere.
    """

    job: _Job
    num_expected: int
    has_met: bool = True
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    _processes: list = field(default_factory=list)
    # By Connection, whose class depends on the platform.
    _pipes: dict[Any, int] = field(default_factory=dict)

    def start(self, places: Sequence[RankPlace]) -> None:
        for index, place in enumerate(places):
            ours, theirs = _CONTEXT.Pipe()
            self._pipes[ours] = index
            self._processes.append(start_process(self.job.main, place, theirs))
            theirs.close()

    def collect(self, timeout_s: float) -> None:
        waiting, num_joined = dict(self._pipes), 0
        deadline = time.monotonic() + timeout_s
        while waiting and self.has_met and len(self.results) < self.num_expected:
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    kind, value = _RAISED, _DIED
                if kind == _JOINED:
                    num_joined += 1
                    if num_joined == len(self._pipes):
                        self._let_all_begin()
                    continue
                (self.results if kind == _RETURNED else self.errors)[waiting.pop(pipe)] = value
                self.has_met = self.has_met and kind != _NOT_JOINED
            if self.errors and self.job.ends_together:
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        if len(self.results) < self.num_expected:
            is_cut_short = self.errors and (self.job.ends_together or not self.has_met)
            late = f"not finished after {timeout_s:.0f} s"
            why = _ENDED_FOR_ANOTHER if is_cut_short else late
            self.errors |= dict.fromkeys(waiting.values(), why)

    def _let_all_begin(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # the rank has died, which its end of the pipe reports

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
