# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The last line of a rank that ends early, and the end of its process."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from megatron_asynchzp.engine.failure.other_collective import (
    collective_of_main_thread,
    main_thread_position,
)

# torch appends C++ frames to some of its messages, after these words.
_CPP_TRACE = "Exception raised from"

# Words of gloo and NCCL for a peer whose process has ended.
_PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


class CollectiveFailure(RuntimeError):
    """Raised if a collective fails or is late; the message names the missing ranks, too."""

    @classmethod
    def of(cls, title: str, error: BaseException) -> "CollectiveFailure":
        reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
        if any(words in reason for words in _PEER_ENDED):
            reason = f"a peer has ended ({reason})"
        if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
            reason = f"{type(error).__name__} {reason}".rstrip()
        failure = cls(f"{title} failed: {reason}")
        failure.__cause__ = error
        return failure

    def add(self, words: str) -> None:
        self.args = (f"{self}; {words}",)


# The last two are a shell's exit statuses for SIGINT and SIGTERM.
EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143

# The main thread prints first: it may have been interrupted, and a background thread takes a peer
# that ended for the same reason for a failure.
_MAIN_PRINTS_S = 1.0
# Then the main thread may end the process. It can be stuck in a collective of Megatron, whose peer
# has ended for the same reason.
_GRACE_S = 3.0


class LastLine:
    """The one line of this rank on stderr, from the first thread that prints it."""

    def __init__(self):
        self._unprinted = [True]  # list.pop is atomic

    def print(self, text: str) -> None:
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
        """Print a line and end the process unless the main thread does; see OnFailure."""
        if wait(_MAIN_PRINTS_S):
            return
        self.print(str(failure))
        if not wait(_GRACE_S):
            end_process(EXIT_FAILURE)


def exit_if_main_thread_stuck(failure: Exception, wait: Callable[[float], bool]) -> None:
    """Print `failure` and end the process if the main thread is stuck and cannot raise it.

    `wait` is that of OnFailure and also returns True when the main thread has raised it.
    """
    before = main_thread_position()
    if before is None:
        return
    is_in_collective = collective_of_main_thread() is not None  # if not, it may soon go on
    if not is_in_collective and (wait(_MAIN_PRINTS_S) or main_thread_position() != before):
        return
    LastLine().print(str(failure))
    if not wait(_GRACE_S) and main_thread_position() == before:
        end_process(EXIT_FAILURE)


def end_process(status: int) -> NoReturn:
    """End this process and its children now.

    Python's own end would wait, in the destructors of process groups, for peers that are gone, and
    a child that writes checkpoints would keep the job's output open.
    """
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
