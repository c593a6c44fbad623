# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The last line of a rank that ends before its time, and that end."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from megatron_asynchzp.failure.other_collective import (
    collective_of_main_thread,
    where_main_thread_stands,
)

# The last two are a shell's statuses for SIGINT and SIGTERM.
EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143

# The main thread, which sees a failure at once, prints first: it may have been interrupted, and a
# background thread takes a peer that ended for the same reason for a failure.
_MAIN_PRINTS_S = 1.0
# How long after that it may take to end the process itself. It can be stuck in a collective of
# Megatron's own, whose peer has ended for the same reason.
_GRACE_S = 3.0


class LastLine:
    """The one line of this rank on stderr, from the first thread that has a reason to print it."""

    def __init__(self):
        self._unprinted = [True]  # list.pop is atomic

    def print(self, text: str) -> None:
        """Print `text`, unless a line was printed before."""
        try:
            self._unprinted.pop()
        except IndexError:
            return
        is_initialized = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_initialized else os.environ.get("RANK", "0")
        # One write: ranks share a terminal.
        sys.stderr.write(f"megatron_asynchzp: rank {rank}: {text}\n")
        sys.stderr.flush()

    def watch_main(self, failure: Exception, wait: Callable[[float], bool]) -> None:
        """Print a line and end the process, where the main thread does neither; see OnFailure."""
        if wait(_MAIN_PRINTS_S):
            return
        self.print(str(failure))
        if not wait(_GRACE_S):
            end_process(EXIT_FAILURE)


def end_where_main_stays(failure: Exception, wait: Callable[[float], bool]) -> None:
    """Print `failure` and end the process where no exception of ours reaches the main thread, as it
    stays in a collective of the script or waits for a device. wait: as in OnFailure; here also
    whether the main thread has raised the failure."""
    before = where_main_thread_stands()
    if before is None:
        return
    is_known = collective_of_main_thread() is not None  # elsewhere it may be about to go on
    if not is_known and (wait(_MAIN_PRINTS_S) or where_main_thread_stands() != before):
        return
    LastLine().print(str(failure))
    if not wait(_GRACE_S) and where_main_thread_stands() == before:
        end_process(EXIT_FAILURE)


def end_process(status: int) -> NoReturn:
    """End this process now. Python's own end would wait, in the destructors of process groups, for
    peers that are gone. Children go too, as they do at Python's own end: a process that Megatron
    starts to write checkpoints would otherwise live on and keep the job's output open."""
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
