# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Lets ranks examine a directory together: all return the same or raise the same."""

from collections.abc import Callable
from typing import Any


class Peers:
    """The ranks that examine a directory together: here, this process alone."""

    rank, size = 0, 1

    def gather(self, mine: Any) -> list[Any]:
        return [mine]

    def broadcast(self, mine: Any) -> Any:
        return mine


def on_first(peers: Peers, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0. Returns its result, or raises its error, on all ranks."""
    value, error = peers.broadcast(_outcome(act) if peers.rank == 0 else None)
    if error is not None:
        raise error
    return value


def on_each(peers: Peers, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on every rank; all return the results by rank, or raise the first error."""
    outcomes = peers.gather(_outcome(act))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # any: the other ranks wait for an answer
        return None, error
