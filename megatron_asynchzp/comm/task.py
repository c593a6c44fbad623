# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a driver is asked to do, and the one line that says what of it failed. Must not know
who does it, or when.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_asynchzp.comm.driver import Job

LANES = {
    "gather": "all-gather of the parameters",
    "reduce": "reduce-scatter of the gradients",
    "grad-sync": "reduction of the gradient shard",
    "param-sync": "gather of the updated parameter shard",
    "order": "comparison of the order of collectives",
}
"""Kinds of operation: each has a stream, and completes its jobs one after the other."""

Steps = Iterator[Any]
"""Yields a torch.distributed.Work for each collective it has issued."""


@dataclass(frozen=True)
class Task:
    """What to issue, when it may start and how to call it.

    lane: one of LANES; unit, ranks, step: for messages; start: makes the generator; ready: events
    it must wait for (None: passed); after: jobs whose results it reads.
    """

    lane: str
    unit: str
    ranks: tuple[int, ...]
    step: int
    start: Callable[[], Steps]
    ready: tuple[Any, ...] = ()
    after: tuple["Job", ...] = ()

    @property
    def title(self) -> str:
        where = f"over ranks {', '.join(map(str, self.ranks))}" if self.ranks else "on this rank"
        return f"{LANES[self.lane]} of {self.unit} {where} in step {self.step}"


class CollectiveFailure(RuntimeError):
    """A collective failed or took too long; the message names operation, unit, ranks and step."""


# torch appends the C++ frames to some of its messages, behind these words.
_CPP_TRACE = "Exception raised from"


def failure_of(task: Task, error: BaseException) -> CollectiveFailure:
    """`error` as the one line that names `task`."""
    if isinstance(error, CollectiveFailure):
        return error
    reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
    if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
        reason = f"{type(error).__name__} {reason}".rstrip()
    failure = CollectiveFailure(f"{task.title} failed: {reason}")
    failure.__cause__ = error
    return failure
