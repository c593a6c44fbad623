# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks inside pytest: start `world_size` gloo processes, run one function on each, collect what
they return. Knows nothing of what the function tests.

The ranks are forked from a server process that has imported torch (and Megatron, where asked)
once, so a world of 8 starts in about a second and shares the pages of those imports.
"""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "tests.support.preload"])


_DIED = "died without a message"
_ENDED_FOR_ANOTHER = "ended because another rank had failed"

# Gloo connects every pair of ranks over TCP. On a machine that is busy one of these connections now
# and then breaks before the ranks have met ("connectFullMesh failed ... Connection closed by
# peer"), which says nothing of what is tested: such a world is started again, on a store that
# knows nothing of it. Once `fn` was called anywhere, nothing is repeated.
_MOST_STARTS = 3

# What a rank tells, with a text or a result; and the key in the store that lets all call `fn`.
_JOINED, _NOT_JOINED, _RAISED, _RETURNED = "joined", "not joined", "raised", "returned"
_BEGIN = "all ranks have joined"


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time; the message holds every rank's traceback."""


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _join(rank: int, world_size: int, port: int) -> Any:
    """Make the default process group; the store of this world."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=90)
    )
    return store


def _rank_main(
    fn: Callable,
    rank: int,
    world_size: int,
    port: int,
    env: dict,
    args: tuple,
    out: Connection,
    ends_together: bool,
    join: Callable,
):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # several ranks share two cores
    failed_as = _NOT_JOINED
    try:
        store = join(rank, world_size, port)
        out.send((_JOINED, None))
        store.wait([_BEGIN], timedelta(seconds=90))
        failed_as = _RAISED
        result = fn(*args)
        if ends_together:
            dist.barrier()
        out.send((_RETURNED, result))
    except BaseException:  # the parent must hear of SystemExit and KeyboardInterrupt too
        out.send((failed_as, traceback.format_exc()))
    out.close()
    for child in multiprocessing.active_children():  # Megatron's writers would outlive the test
        child.kill()
    os._exit(0)  # a peer may be gone already: no teardown that could wait for it


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks and return their results in rank order.

    `fn`, `args` and the results must pickle (`fn` is a module-level function). The default
    process group is initialised on every rank before `fn` runs on any. `env` is set on every rank.

    Raises RankFailure when a rank raises, dies or exceeds `timeout_s` seconds; all ranks are
    killed then.
    """
    results, errors = _collect(fn, world_size, args, timeout_s, env or {})
    if errors:
        told = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
        raise RankFailure(f"{len(errors)} of {world_size} ranks failed\n{told}")
    return [results[rank] for rank in range(world_size)]


def observe_ranks(
    fn: Callable, world_size: int, *args: Any, num_survivors: int, timeout_s: float = 90.0
) -> dict[int, Any]:
    """As `run_ranks` where ranks are to die or to hang: what the others returned, by rank.

    Returns when `num_survivors` ranks have, or all others have died; whoever still runs is killed
    then. Raises RankFailure where one raised, or where that takes longer than `timeout_s` seconds.
    """
    results, errors = _collect(fn, world_size, args, timeout_s, {}, num_survivors)
    faults = [text for text in errors.values() if text != _DIED]
    if faults:
        raise RankFailure("\n".join(faults))
    return results


def _collect(
    fn: Callable,
    world_size: int,
    args: tuple,
    timeout_s: float,
    env: dict,
    num_survivors: int | None = None,
    join: Callable = _join,
) -> tuple[dict[int, Any], dict[int, str]]:
    """What the ranks returned, and what became of those that did not, by rank.

    num_survivors: ranks that will return, where not all do; join: as `_join`.
    """
    for _ in range(_MOST_STARTS):
        results, errors, has_met = _start(fn, world_size, args, timeout_s, env, num_survivors, join)
        if has_met:
            break
    return results, errors


def _start(
    fn: Callable,
    world_size: int,
    args: tuple,
    timeout_s: float,
    env: dict,
    num_survivors: int | None,
    join: Callable,
) -> tuple[dict[int, Any], dict[int, str], bool]:
    """As `_collect`, once. The last is False where a rank could not join: `fn` was not called."""
    ends_together = num_survivors is None
    num_expected = world_size if ends_together else num_survivors
    import torch.distributed as dist

    # This process serves the store: a port that was only found free could be taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank_main,
            args=(fn, rank, world_size, store.port, env, args, sender, ends_together, join),
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    num_joined, has_met = 0, True
    deadline = time.monotonic() + timeout_s
    try:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        while waiting and has_met:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = _RAISED, _DIED
                if kind == _JOINED:
                    num_joined += 1
                    if num_joined == world_size:
                        store.set(_BEGIN, "")
                    continue
                rank = waiting.pop(pipe)
                (results if kind == _RETURNED else errors)[rank] = value
                has_met = has_met and kind != _NOT_JOINED
            if len(results) == num_expected:
                break
            if errors and ends_together:  # give the others a moment to report the same fault
                deadline = min(deadline, time.monotonic() + 3.0)
        if len(results) < num_expected:
            is_cut_short = bool(errors) and (ends_together or not has_met)
            late = f"not finished after {timeout_s:.0f} s"
            why = _ENDED_FOR_ANOTHER if is_cut_short else late
            errors |= dict.fromkeys(waiting.values(), why)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results, errors, has_met
