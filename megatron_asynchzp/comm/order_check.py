# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of what the ranks submitted: one hash per step and, where it differs, the
first difference in words.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import cast

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    and_then,
)
from megatron_asynchzp.comm.driver import Driver, Task, hash_of

_NOTHING = -1  # the code of an entry that a shorter record does not have
_MAX_CHARACTERS = 160  # of an entry, in the message


class OrderMismatch(RuntimeError):
    """The ranks of a sharding group issued different collectives; the message names them."""


class OrderCheck:
    """Compares, once per step, what the ranks submitted to their drivers since the last time.

    axes: those of a sharding group, one after the other, so that what spreads over each reaches all
        its ranks.
    device: where the hashes are compared.
    """

    def __init__(self, driver: Driver, axes: Sequence[AxisGroup], device: torch.device):
        self._driver, self._axes, self._device = driver, axes, device
        self._mine: list[str] = []
        self._answer = torch.empty(0)  # on the host
        self._task: Task | None = None

    def start(self) -> None:
        """Begin to compare, and forget what was submitted. Collective.

        Finishes the comparison before, which may raise.
        """
        self.finish()
        self._mine, self._driver.submitted = self._driver.submitted, []
        value = hash_of(self._mine)
        answer = self._answer = self._driver.device.new_host_memory((2, 1), torch.int64)

        def steps() -> Steps:
            # Allocated here, [Note: memory of a task]. Filled on the device: a copy from the host
            # would hold it until the device has caught up.
            own = torch.full((1,), value, dtype=torch.int64, device=self._device)
            extremes = torch.stack([own, -own])
            last = yield from all_reduce_steps(extremes, self._axes, dist.ReduceOp.MAX)
            return and_then(last, lambda: answer.copy_(extremes, non_blocking=True))

        self._task = self._submit(steps)

    def wait(self) -> None:
        """Return when the ranks have met: their communicators are free for other operations. On a
        device they are in order by themselves."""
        if self._task is not None and not self._driver.device.runs_ahead:
            self._task.wait()

    def send_answer(self) -> None:
        """On a device: let the answer travel to the host while the next step goes on. Issued later
        than this, it would be behind much else where a device has a single queue."""
        if self._task is not None and self._driver.device.runs_ahead:
            self._task.await_usable()

    def finish(self) -> None:
        """Raises OrderMismatch, with one message on every rank, where one rank differs, and
        CollectiveFailure where the ranks do not even meet here. No-op where nothing was started."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.await_usable()
        self._driver.device.synchronize(task.event, self._driver.limit_s)
        if _first_difference(self._answer) is not None:
            mismatch = OrderMismatch(f"step {task.step}: {self._describe_difference()}")
            self._driver.fail(mismatch)  # this step's gradients are of no use
            raise mismatch

    def _submit_max(self, values: torch.Tensor) -> Task:
        """Begin to replace each of `values` by the largest over all ranks, in place."""
        return self._submit(partial(all_reduce_steps, values, self._axes, dist.ReduceOp.MAX))

    def _submit(self, start: Callable[[], Steps]) -> Task:
        driver = self._driver
        # Other model chunks of this rank may still use the same communicators.
        after = [driver.latest.get(lane) for lane in ("reduce", "grad-sync")]
        ready = (driver.device.record_event(),)
        return driver.submit(Task("order", "all units", self._axes, start, ready, after))

    def _describe_difference(self) -> str:
        """The first place at which a rank did something else, which ranks did what there, and the
        remedy."""
        mine = self._mine
        length = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
        self._submit_max(length).wait()
        codes = torch.full((int(length),), _NOTHING, dtype=torch.int64)
        codes[: len(mine)] = torch.tensor([hash_of([entry]) for entry in mine])
        extremes = torch.stack([codes, -codes]).to(self._device)
        self._submit_max(extremes).wait()
        index = _first_difference(extremes)
        if index is None:
            return "the ranks issued different collectives"
        own = mine[index] if index < len(mine) else "nothing"
        ranks_of: dict[str, list[int]] = {}
        for rank, entry in sorted(self._gather_entries(own).items()):
            ranks_of.setdefault(entry, []).append(rank)
        parts = [f"'{entry}' on {_name_ranks(ranks)}" for entry, ranks in ranks_of.items()]
        return (
            f"collective {index} since the last comparison was {' and '.join(parts)}; "
            "every rank must call the same modules in the same order"
        )

    def _gather_entries(self, own: str) -> dict[int, str]:
        """The entry of every rank, by global rank. Collective."""
        row = torch.zeros(1 + _MAX_CHARACTERS, dtype=torch.int64)
        text = own.encode("ascii", "replace")[:_MAX_CHARACTERS]
        row[: 1 + len(text)] = torch.tensor([dist.get_rank(), *text])
        row = row.to(self._device)
        rows = row.new_empty(prod(axis.axis.size for axis in self._axes), len(row))
        self._submit(partial(all_gather_steps, row, rows.view(-1), self._axes)).wait()
        lines = cast("list[list[int]]", rows.tolist())  # pyright: ignore[reportUnknownMemberType]
        return {line[0]: bytes(filter(None, line[1:])).decode() for line in lines}


def _first_difference(extremes: torch.Tensor) -> int | None:
    """The first index at which largest and (negated) smallest differ; None: there is none."""
    differs = (extremes[0] != -extremes[1]).nonzero()
    return int(differs[0]) if len(differs) else None


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
