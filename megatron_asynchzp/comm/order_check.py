# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns orders: in which a step uses its units, and in which collectives were issued.
Must not know memory or what a unit is.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import all_gather_flat


class UseOrder:
    """The sequence of uses of one step, forward and backward of all micro-batches.

    Every step is recorded and is what the next one is expected to do. A step that departs from it
    (a module skipped, an early exit) is followed no further: `upcoming` is empty until `restart`.
    """

    def __init__(self):
        self._expected: list[Hashable] = []
        self._used: list[Hashable] = []
        self._is_followed = True

    def restart(self) -> None:
        """A step begins; the one before it, if it used anything, is the record from now on."""
        if self._used:
            self._expected, self._used = self._used, []
        self._is_followed = True

    def visit(self, unit: Hashable) -> Hashable | None:
        """`unit` is used now. Returns the unit that was expected, at the first departure only."""
        position = len(self._used)
        self._used.append(unit)
        if not self._is_followed or position >= len(self._expected):
            return None
        expected = self._expected[position]
        self._is_followed = expected == unit
        return None if self._is_followed else expected

    def upcoming(self, most: int) -> Iterator[Hashable]:
        """The next uses, as far as they are known, at most that many."""
        position = len(self._used)
        end = min(position + most, len(self._expected)) if self._is_followed else position
        return (self._expected[place] for place in range(position, end))


class OrderMismatch(RuntimeError):
    """The ranks of a sharding group issued different collectives; the message says which."""


StartSteps = Callable[[], Iterator[dist.Work]]
RunSteps = Callable[[StartSteps], None]
"""Makes the iterator, issues and completes what it yields; raises where that takes too long."""


class Waitable(Protocol):
    """What was submitted, until it is complete."""

    def wait(self) -> None: ...


_NOTHING = -1  # the code of an entry that a shorter log does not have
_MOST_CHARACTERS = 160  # of an entry, in the message


class IssueLog:
    """What this rank submitted since the last check, as a hash and, for the message, as text."""

    def __init__(self):
        self._entries: list[str] = []
        self._hash = 0

    def add(self, lane: str, unit: str) -> None:
        """For the main thread, as it submits; what is issued keeps that order."""
        entry = f"{lane} {unit}"
        self._entries.append(entry)
        self._hash = zlib.crc32(entry.encode(), self._hash)

    def forget(self) -> None:
        """Nothing before this moment will be compared."""
        self._entries, self._hash = [], 0

    def start_check(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        step: int,
        submit: Callable[[StartSteps], Waitable],
    ) -> "OrderCheck":
        """Begin to compare with all ranks reachable over `groups`, and forget. Collective.

        groups: one per axis of a sharding group, so that what spreads over each reaches all.
        """
        mine, told = self._entries, torch.tensor([self._hash], dtype=torch.int64, device=device)
        self.forget()
        return OrderCheck(mine, told, groups, step, submit)


class OrderCheck:
    """One comparison, on its way."""

    def __init__(
        self,
        mine: list[str],
        told: torch.Tensor,
        groups: Sequence[dist.ProcessGroup],
        step: int,
        submit: Callable[[StartSteps], Waitable],
    ):
        self._mine, self._groups, self._step, self._submit = mine, groups, step, submit
        self._extremes = torch.stack([told, -told])
        self._job = submit(partial(_spread_steps, self._extremes, groups))

    def wait(self) -> None:
        """Return when the ranks have met: their communicators are free for other operations."""
        self._job.wait()

    def finish(self) -> None:
        """Raises OrderMismatch, with one message on every rank, where one rank differs."""
        self._job.wait()
        if _difference_in(self._extremes) is not None:
            device = self._extremes.device
            told = _describe_difference(self._mine, self._groups, device, self._run)
            raise OrderMismatch(f"step {self._step}: {told}")

    def _run(self, start: StartSteps) -> None:
        self._submit(start).wait()


def _spread_steps(
    extremes: torch.Tensor, groups: Sequence[dist.ProcessGroup]
) -> Iterator[dist.Work]:
    for group in groups:
        yield dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group, async_op=True)


def _difference_in(extremes: torch.Tensor) -> int | None:
    """The first index at which largest and (negated) smallest differ; None: there is none."""
    differs = (extremes[0] != -extremes[1]).nonzero()
    return int(differs[0]) if len(differs) else None


def _first_difference(
    values: torch.Tensor, groups: Sequence[dist.ProcessGroup], run: RunSteps
) -> int | None:
    """The first index at which one of the ranks has another value; None: there is none."""
    extremes = torch.stack([values, -values])
    run(partial(_spread_steps, extremes, groups))
    return _difference_in(extremes)


def _describe_difference(
    mine: list[str], groups: Sequence[dist.ProcessGroup], device: torch.device, run: RunSteps
) -> str:
    """The first place at which a rank did something else, who did what there, and the remedy."""
    length = torch.tensor([len(mine)], dtype=torch.int64, device=device)

    def length_steps() -> Iterator[dist.Work]:
        for group in groups:
            yield dist.all_reduce(length, dist.ReduceOp.MAX, group=group, async_op=True)

    run(length_steps)
    codes = torch.full((int(length),), _NOTHING, dtype=torch.int64)
    codes[: len(mine)] = torch.tensor([zlib.crc32(entry.encode()) for entry in mine])
    index = _first_difference(codes.to(device), groups, run)
    if index is None:
        return "the ranks issued different collectives"
    own = mine[index] if index < len(mine) else "nothing"
    ranks_of: dict[str, list[int]] = {}
    for rank, entry in sorted(_gather_entries(own, groups, device, run).items()):
        ranks_of.setdefault(entry, []).append(rank)
    told = " and ".join(f"'{entry}' on {_name_ranks(ranks)}" for entry, ranks in ranks_of.items())
    return (
        f"collective {index} since the last comparison was {told}; "
        "every rank must call the same modules in the same order"
    )


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gather_entries(
    own: str, groups: Sequence[dist.ProcessGroup], device: torch.device, run: RunSteps
) -> dict[int, str]:
    """The entry of every rank reachable over `groups`, by global rank. Collective over them."""
    row = torch.zeros(1, 1 + _MOST_CHARACTERS, dtype=torch.int64)
    text = own.encode("ascii", "replace")[:_MOST_CHARACTERS]
    row[0, : 1 + len(text)] = torch.tensor([dist.get_rank(), *text])
    rows = [row.to(device)]

    def steps() -> Iterator[dist.Work]:
        for group in groups:
            flat = rows[0].flatten()
            rows[0] = flat.new_empty(group.size() * len(rows[0]), row.shape[1])
            yield all_gather_flat(rows[0].view(-1), flat, group=group, async_op=True)

    run(steps)
    return {line[0]: bytes(filter(None, line[1:])).decode() for line in rows[0].tolist()}
