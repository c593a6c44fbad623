# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compares what the ranks submitted, and their settings: one hash per step.

If the hashes differ, it finds the first difference and describes it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    finished,
    followed_by,
    ranks_along,
)
from megatron_asynchzp.engine.comm.driver import Driver, crosses_groups, hash_of
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.errors import name_ranks

_NOTHING = -1  # the hash of a missing entry in a shorter record
_SETTING = "setting "  # the beginning of an entry that is no collective
_MAX_CHARACTERS = 160  # of an entry, in the message


class OrderMismatch(RuntimeError):
    """Raised if the ranks of a sharding group issued different collectives."""


class OrderCheck:
    """Compares, once per step, the tasks that the ranks submitted since the last comparison.

    Ranks that compute in step compare all tasks; groups of them compare the tasks that cross groups
    ([Note: unequal micro-batches]).
    """

    def __init__(
        self,
        driver: Driver,
        axes: Sequence[AxisGroup],  # of a sharding group, innermost first
        num_in_step: int,  # axes that connect ranks that compute in step
        device: torch.device,
    ):
        self._driver, self._axes, self._device = driver, axes, device
        self._in_step, self._crossing = axes[:num_in_step], axes[num_in_step:]
        in_step = ranks_along(self._in_step)
        driver.compared |= {rank: rank in in_step for rank in ranks_along(axes)}
        self._mine: list[str] = []
        self._answer = torch.empty(0)  # extremes of the hashes, on the host
        self._task: Task | None = None

    def start(
        self, settings: Mapping[str, str] = MappingProxyType({}), of: str = "all units"
    ) -> None:
        """Finish the last comparison, which may raise, and start the next one. Collective.

        `settings` are compared along with the tasks (see agreement.Settings).
        """
        self.finish()
        self._mine = self._driver.submitted.drain()
        self._mine += (f"{_SETTING}{name}: {value}" for name, value in settings.items())
        values = hash_of(self._mine), hash_of(filter(crosses_groups, self._mine))
        answer = self._answer = self._driver.device.new_host_memory((2, 2), torch.int64)

        def steps() -> Steps:
            # Allocated here, [Note: memory of a task], and filled on the device, because a copy
            # from the host would make the host wait for the device.
            own = [torch.full((1,), v, dtype=torch.int64, device=self._device) for v in values]
            extremes = torch.stack([*own, *(-value for value in own)]).view(2, 2)
            last = yield from all_reduce_steps(extremes, self._in_step, dist.ReduceOp.MAX)
            if self._crossing:
                yield from finished(last)
                # 1 in a group whose ranks differ, else 0: the comparison of groups finds this.
                extremes[:, 0] = (extremes[0, 0] != -extremes[1, 0]).to(torch.int64)
                last = yield from all_reduce_steps(extremes, self._crossing, dist.ReduceOp.MAX)
            return followed_by(last, lambda: answer.copy_(extremes, non_blocking=True))

        self._task = self._submit(steps, of)

    def wait(self) -> None:
        """Wait until the comparison no longer uses its communicators; needed only on a CPU."""
        if self._task is not None and not self._driver.device.runs_ahead:
            self._task.wait()

    def send_answer(self) -> None:
        """Start to copy the answer to the host while the next step runs, if the device runs ahead.

        Issued later, it would wait behind other work on a device with one queue.
        """
        if self._task is not None and self._driver.device.runs_ahead:
            self._task.await_usable()

    def finish(self) -> None:
        """Wait for the comparison, if one was started.

        Raises OrderMismatch if a rank differs, with the same message on every rank.
        """
        if self._task is None:
            return
        task, self._task = self._task, None
        task.await_usable()
        self._driver.await_event(task.event)
        if _first_difference(self._answer) is not None:
            mismatch = OrderMismatch(f"step {task.step}: {self._describe_difference()}")
            self._driver.fail(mismatch)  # this step's gradients are useless
            raise mismatch

    def reduce_max(self, values: torch.Tensor, axes: Sequence[AxisGroup] | None = None) -> None:
        axes = self._axes if axes is None else axes
        self._submit(partial(all_reduce_steps, values, axes, dist.ReduceOp.MAX)).wait()

    def _submit(self, start: Callable[[], Steps], of: str = "all units") -> Task:
        return submit_comparison(self._driver, of, self._axes, start)

    def _describe_difference(self) -> str:
        """Describe the first difference, in the first group that has one, and the remedy."""
        crossing = list(filter(crosses_groups, self._mine))
        for record, axes in ((self._mine, self._in_step), (crossing, self._axes)):
            index = self._find_difference(record, axes)
            own = "" if index is None else record[index] if index < len(record) else "nothing"
            entries = self._gather_entries(own, index or 0, axes)
            if not entries:
                continue
            first = min(entry.group for entry in entries)
            ranks_of: dict[str, list[int]] = {}
            for entry in entries:
                if entry.group == first:
                    ranks_of.setdefault(entry.name, []).append(entry.rank)
            if any(name.startswith(_SETTING) for name in ranks_of):
                return _describe_setting(ranks_of)
            parts = [f"'{name}' on {name_ranks(ranks)}" for name, ranks in ranks_of.items()]
            number = next(entry.number for entry in entries if entry.group == first)
            return (
                f"collective {number} since the last comparison was {' and '.join(parts)}; "
                "every rank must call the same modules in the same order"
            )
        return "the ranks issued different collectives"

    def _find_difference(self, record: list[str], axes: Sequence[AxisGroup]) -> int | None:
        length = torch.tensor([len(record)], dtype=torch.int64, device=self._device)
        self.reduce_max(length, axes)
        hashes = torch.full((int(length),), _NOTHING, dtype=torch.int64)
        hashes[: len(record)] = torch.tensor([hash_of([entry]) for entry in record])
        extremes = torch.stack([hashes, -hashes]).to(self._device)
        self.reduce_max(extremes, axes)
        return _first_difference(extremes)

    def _gather_entries(self, own: str, index: int, axes: Sequence[AxisGroup]) -> "list[_Entry]":
        """Return the differing entry of each rank whose group along `axes` has a difference.

        Collective over all axes; sorted by global rank.
        """
        row = torch.zeros(3 + _MAX_CHARACTERS, dtype=torch.int64)
        text = own.encode("ascii", "replace")[:_MAX_CHARACTERS]
        # Equal for ranks that `axes` connect.
        group = sum(line.axis.coordinate * line.axis.stride for line in self._axes[len(axes) :])
        row[: 3 + len(text)] = torch.tensor([dist.get_rank(), group, index, *text])
        row = row.to(self._device)
        rows = row.new_empty(prod(axis.axis.size for axis in self._axes), len(row))
        self._submit(partial(all_gather_steps, row, rows.view(-1), self._axes)).wait()
        lines = cast("list[list[int]]", rows.tolist())  # pyright: ignore[reportUnknownMemberType]
        entries = [
            _Entry(line[0], line[1], line[2], bytes(filter(None, line[3:])).decode())
            for line in lines
        ]
        return sorted({entry for entry in entries if entry.name})


def submit_comparison(
    driver: Driver, subject: str, axes: Sequence[AxisGroup], start: Callable[[], Steps]
) -> Task:
    # Other model chunks of this rank may still use the same communicators.
    after = [driver.latest.get(lane) for lane in ("reduce", "grad-sync")]
    return driver.submit(
        Task("order", subject, axes, start, (driver.device.record_event(),), after)
    )


class _Entry(NamedTuple):
    rank: int  # global
    group: int  # of the ranks that are compared
    number: int  # in the rank's record
    name: str


def _describe_setting(ranks_of: Mapping[str, Sequence[int]]) -> str:
    texts = {entry.removeprefix(_SETTING): name_ranks(ranks) for entry, ranks in ranks_of.items()}
    names = {text.partition(": ")[0] for text in texts}
    if len(names) == 1:
        parts = [f"{text.partition(': ')[2]} on {ranks}" for text, ranks in texts.items()]
    else:
        names = {"an optimizer's setting"}
        parts = [f"'{text}' on {ranks}" for text, ranks in texts.items()]
    return (
        f"{names.pop()} is {' and '.join(parts)}; change the optimizer's settings alike on every "
        "rank, for example by a scheduler that each rank steps"
    )


def _first_difference(extremes: torch.Tensor) -> int | None:
    differs = (extremes[0] != -extremes[1]).nonzero()
    return int(differs[0]) if len(differs) else None
