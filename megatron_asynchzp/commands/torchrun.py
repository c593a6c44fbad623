# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""torchrun that names the nodes it waits for, and that ends well in three cases.

`python -m megatron_asynchzp.commands.torchrun ...`. torchrun itself ends

- after SIGTERM with 1 and a traceback whatever its ranks did, so a scheduler takes a run that saved
  well for a failure;
- never, if the node of the rendezvous is gone;
- at once if a rank has failed, and with it the store in which the other nodes look for ranks.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from subprocess import Popen
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from megatron_asynchzp.engine.failure.roll_call import lasts_s

_HELD_S = 5.0
"""How long a call of the rendezvous' store takes before the store counts as gone: milliseconds."""
_LOOKS_EVERY_S = 0.2
_MISSED_AFTER_S, _MISSED_AGAIN_S = 15.0, 60.0
"""Nodes that have not met by then are missed in a line, and in another one each time after it."""
_MOST_ON_A_NODE = 16  # ranks


def watch_ranks() -> dict[int, Popen]:
    """Return the processes that torchrun starts from now on, by place on this node, newest each."""
    started: dict[int, Popen] = {}
    kind: Any = subprocess_handler.SubprocessHandler
    original = kind.__init__

    def noting(handler: Any, *args: Any, **kwargs: Any) -> None:
        original(handler, *args, **kwargs)
        started[handler.local_rank_id] = handler.proc

    kind.__init__ = noting
    return started


def watch_rendezvous(are_ranks_gone: Callable[[], bool]) -> None:
    """End this process with a line and status 1 once its ranks and the store are gone."""
    # torchrun looks into the c10d store for further nodes ten times a second, and for its own ranks
    # only after that.
    kind: Any = c10d_rendezvous_backend.C10dRendezvousBackend
    original = kind._call_store
    begun: dict[int, float] = {}  # when the call began that a thread is in

    def noting(backend: Any, *args: Any, **kwargs: Any) -> Any:
        begun[threading.get_ident()] = time.monotonic()
        try:
            return original(backend, *args, **kwargs)
        finally:
            del begun[threading.get_ident()]

    def watch() -> None:
        while True:
            time.sleep(_LOOKS_EVERY_S)
            since = min(list(begun.values()), default=float("inf"))
            if time.monotonic() - since > _HELD_S and are_ranks_gone():
                sys.stderr.write(
                    "megatron_asynchzp: no rank of this node is left, and the rendezvous does not "
                    "answer: its node is gone, or this one is cut off\n"
                )
                sys.stderr.flush()
                os._exit(1)

    kind._call_store = noting
    threading.Thread(target=watch, name="asynchzp-rendezvous", daemon=True).start()


def watch_meeting(ranks: dict[int, Popen], host: str) -> None:
    """Write a line to stderr now and then until this node has started a rank."""

    def watch() -> None:
        begun = time.monotonic()
        time.sleep(_MISSED_AFTER_S)
        while not ranks:
            waited_s = time.monotonic() - begun
            sys.stderr.write(
                f"megatron_asynchzp: waiting for {waited_s:.0f} s for all nodes to meet at {host};"
                " is that the first node's address, and has it started?\n"
            )
            sys.stderr.flush()
            time.sleep(_MISSED_AGAIN_S)

    threading.Thread(target=watch, name="asynchzp-meeting", daemon=True).start()


@contextmanager
def keeping_store(nodes: int) -> Generator[None]:
    """Keep the store, which the failure's traceback holds, for the ranks of other nodes."""
    try:
        yield
    except ChildFailedError:
        time.sleep(lasts_s(nodes * _MOST_ON_A_NODE))
        raise


def main(argv: list[str]) -> int:
    """Return 0 also if SIGTERM came and then every rank of this node ended with 0."""
    ranks = watch_ranks()
    watch_rendezvous(
        lambda: bool(ranks) and all(rank.poll() is not None for rank in list(ranks.values()))
    )
    asked = run.parse_args(argv)
    most_nodes = run.parse_min_max_nnodes(asked.nnodes)[1]
    if most_nodes > 1:
        watch_meeting(ranks, asked.rdzv_endpoint or f"{asked.master_addr}:{asked.master_port}")
    try:
        with keeping_store(most_nodes) if most_nodes > 1 else nullcontext():
            run.main(argv)
    except SignalException as ended:
        is_asked = ended.sigval == signal.SIGTERM
        if not is_asked or not ranks or any(rank.poll() != 0 for rank in ranks.values()):
            raise
        print("megatron_asynchzp: SIGTERM: every rank of this node ended well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
