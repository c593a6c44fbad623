# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns an emulated cluster: starts the ranks of its nodes on this machine, joins them by the
modelled network, runs one function on all of them, and leaves nothing behind. Must not know what
the function does.

    cluster = Cluster(nodes=2, ranks_per_node=2, profile=named_profile("slow-between-nodes"))
    results = cluster.run(measure, settings, timeout_s=60)    # measure(network, settings)

The ranks are forked from a server process that has imported torch, and what `preload` names, once:
a cluster starts in about a second, whatever the run before it did to its processes.
"""

import multiprocessing
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scripts.testbed.profile import NetworkProfile

_CONTEXT = multiprocessing.get_context("forkserver")
_RAISED = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")  # a traceback's last line
_LAST_WORDS_S = 3.0  # after one rank has failed the others may still tell the same fault


class ClusterFailure(RuntimeError):
    """A rank raised, died or took too long. `reason`: one line; the message: all tracebacks."""

    def __init__(self, told: dict[int, str]):
        lines = [line for text in told.values() for line in text.splitlines() if line.strip()]
        raised = [line for line in lines if _RAISED.match(line)] or lines
        # A rank that lost a peer says so; the peer's own error says why.
        self.reason = next((line for line in raised if "FabricError" not in line), raised[0])
        super().__init__("\n".join(f"--- rank {r} ---\n{t}" for r, t in sorted(told.items())))


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
        log: Path = Path(os.devnull),
    ) -> list[Any]:
        """`fn(network, *args)` on every rank, whose default process group is the network; what
        they returned, in their order. fn, args and results must pickle.

        is_joined: False runs every rank as a world of its own: the same load, no communication.
        log: file that what the ranks print is appended to. Raises ClusterFailure. Whatever
        happens, no rank runs afterwards.
        """
        import torch.distributed as dist

        profile = replace(self.profile, ranks_per_node=self.ranks_per_node)
        # Served here: a port that was only found free could be taken meanwhile.
        stores = [
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for _ in range(1 if is_joined else self.num_ranks)
        ]
        ranks = [
            _Rank(rank, self.num_ranks, stores[0].port, profile)
            if is_joined
            else _Rank(0, 1, stores[rank].port, profile)
            for rank in range(self.num_ranks)
        ]
        return _collect(ranks, fn, args, timeout_s, log)


@dataclass(frozen=True)
class _Rank:
    """What one process has to know to join."""

    rank: int
    world_size: int
    port: int
    profile: NetworkProfile

    def main(self, fn: Callable, args: tuple, out: Connection, log: Path) -> None:
        """The life of a rank."""
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.profile.ranks_per_node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            GLOO_SOCKET_IFNAME="lo",
        )
        try:
            import torch
            import torch.distributed as dist

            from scripts.testbed import fabric

            torch.set_num_threads(1)  # several ranks share the cores
            store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
            network = fabric.register(self.profile)
            dist.init_process_group(
                fabric.BACKEND,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=60),
            )
            result = fn(network, *args)
            dist.barrier()
            out.send((True, result))
        except BaseException:  # the parent must hear of SystemExit and KeyboardInterrupt too
            out.send((False, traceback.format_exc()))
        out.close()
        os._exit(0)  # a peer may be gone already: no teardown that could wait for it


def preload(modules: Sequence[str]) -> None:
    """Modules that the server of the ranks imports once. Before the first run of a process."""
    _CONTEXT.set_forkserver_preload(["torch", "torch.distributed", *modules])


def _end_with_parent(parent: int) -> None:
    """Whoever started the cluster was killed: end too, instead of waiting for peers for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _collect(
    ranks: list[_Rank], fn: Callable, args: tuple, timeout_s: float, log: Path
) -> list[Any]:
    processes, waiting = [], {}
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    try:
        for index, rank in enumerate(ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=rank.main, args=(fn, args, sender, log), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            waiting[receiver] = index
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                index = waiting.pop(pipe)
                try:
                    is_ok, value = pipe.recv()
                except EOFError:
                    is_ok, value = False, "died without a message"
                (results if is_ok else errors)[index] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    if waiting and not errors:
        errors = dict.fromkeys(waiting.values(), f"not finished after {timeout_s:.0f} s")
    if errors:
        raise ClusterFailure(errors)
    return [results[index] for index in range(len(ranks))]
