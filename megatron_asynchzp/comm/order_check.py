# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of what the ranks submitted, and of what they are set to: one hash per step
and, where it differs, the first difference in words.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    finished,
    followed_by,
    ranks_along,
)
from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.submitted import crosses_groups, hash_of
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.errors import name_ranks

_NOTHING = -1  # the code of an entry that a shorter record does not have
_SETTING = "setting "  # begins an entry that is no collective
_MAX_CHARACTERS = 160  # of an entry, in the message


class OrderMismatch(RuntimeError):
    """The ranks of a sharding group issued different collectives; the message names them."""


class OrderCheck:
    """Compares, once per step, what the ranks submitted since the last time: all of it within each
    group of ranks that compute in step, and between these groups what crosses them
    ([Note: unequal micro-batches]).

    axes: those of a sharding group, innermost first, so that what spreads over each reaches all its
        ranks.
    num_in_step: how many of the axes connect ranks that compute in step.
    device: where the hashes are compared.
    """

    def __init__(
        self, driver: Driver, axes: Sequence[AxisGroup], num_in_step: int, device: torch.device
    ):
        self._driver, self._axes, self._device = driver, axes, device
        self._in_step, self._crossing = axes[:num_in_step], axes[num_in_step:]
        in_step = ranks_along(self._in_step)
        driver.compared |= {rank: rank in in_step for rank in ranks_along(axes)}
        self._mine: list[str] = []
        self._answer = torch.empty(0)  # on the host
        self._task: Task | None = None

    def start(self, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Begin to compare, and forget what was submitted. Collective.

        settings: see agreement.Settings, compared with it.

        Finishes the comparison before, which may raise.
        """
        self.finish()
        self._mine = self._driver.submitted.take()
        self._mine += (f"{_SETTING}{name}: {value}" for name, value in settings.items())
        values = hash_of(self._mine), hash_of(filter(crosses_groups, self._mine))
        answer = self._answer = self._driver.device.new_host_memory((2, 2), torch.int64)

        def steps() -> Steps:
            # Allocated here, [Note: memory of a task]. Filled on the device: a copy from the host
            # would hold it until the device has caught up.
            own = [torch.full((1,), v, dtype=torch.int64, device=self._device) for v in values]
            extremes = torch.stack([*own, *(-value for value in own)]).view(2, 2)
            last = yield from all_reduce_steps(extremes, self._in_step, dist.ReduceOp.MAX)
            if self._crossing:
                yield from finished(last)
                # A difference within a group stays one: 1 here, 0 elsewhere.
                extremes[:, 0] = (extremes[0, 0] != -extremes[1, 0]).to(torch.int64)
                last = yield from all_reduce_steps(extremes, self._crossing, dist.ReduceOp.MAX)
            return followed_by(last, lambda: answer.copy_(extremes, non_blocking=True))

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
        self._driver.await_event(task.event)
        if _first_difference(self._answer) is not None:
            mismatch = OrderMismatch(f"step {task.step}: {self._describe_difference()}")
            self._driver.fail(mismatch)  # this step's gradients are of no use
            raise mismatch

    def take_largest(self, values: torch.Tensor) -> None:
        """Replace each of `values` by the largest over all ranks, in place. Collective."""
        self._submit_max(values, self._axes)

    def _submit_max(self, values: torch.Tensor, axes: Sequence[AxisGroup]) -> None:
        """Replace each of `values` by the largest over all ranks along `axes`, in place."""
        self._submit(partial(all_reduce_steps, values, axes, dist.ReduceOp.MAX)).wait()

    def _submit(self, start: Callable[[], Steps]) -> Task:
        driver = self._driver
        # Other model chunks of this rank may still use the same communicators.
        after = [driver.latest.get(lane) for lane in ("reduce", "grad-sync")]
        ready = (driver.device.record_event(),)
        return driver.submit(Task("order", "all units", self._axes, start, ready, after))

    def _describe_difference(self) -> str:
        """The first place at which a rank did something else, which ranks did what there, and the
        remedy. Of differences in several groups that of the first one."""
        crossing = list(filter(crosses_groups, self._mine))
        for record, axes in ((self._mine, self._in_step), (crossing, self._axes)):
            index = self._find_difference(record, axes)
            own = "" if index is None else record[index] if index < len(record) else "nothing"
            places = self._gather_places(own, index or 0, axes)
            if not places:
                continue
            first = min(place.group for place in places)
            ranks_of: dict[str, list[int]] = {}
            for place in places:
                if place.group == first:
                    ranks_of.setdefault(place.entry, []).append(place.rank)
            if any(entry.startswith(_SETTING) for entry in ranks_of):
                return _describe_setting(ranks_of)
            parts = [f"'{entry}' on {name_ranks(ranks)}" for entry, ranks in ranks_of.items()]
            number = next(place.number for place in places if place.group == first)
            return (
                f"collective {number} since the last comparison was {' and '.join(parts)}; "
                "every rank must call the same modules in the same order"
            )
        return "the ranks issued different collectives"

    def _find_difference(self, record: list[str], axes: Sequence[AxisGroup]) -> int | None:
        """The first index at which the records of the ranks along `axes` differ."""
        length = torch.tensor([len(record)], dtype=torch.int64, device=self._device)
        self._submit_max(length, axes)
        codes = torch.full((int(length),), _NOTHING, dtype=torch.int64)
        codes[: len(record)] = torch.tensor([hash_of([entry]) for entry in record])
        extremes = torch.stack([codes, -codes]).to(self._device)
        self._submit_max(extremes, axes)
        return _first_difference(extremes)

    def _gather_places(self, own: str, index: int, axes: Sequence[AxisGroup]) -> "list[_Place]":
        """Return where every rank whose group, along `axes`, has a difference has it, and its entry
        there, by global rank. Collective over all axes."""
        row = torch.zeros(3 + _MAX_CHARACTERS, dtype=torch.int64)
        text = own.encode("ascii", "replace")[:_MAX_CHARACTERS]
        # Equal for ranks that `axes` connect.
        group = sum(one.axis.coordinate * one.axis.stride for one in self._axes[len(axes) :])
        row[: 3 + len(text)] = torch.tensor([dist.get_rank(), group, index, *text])
        row = row.to(self._device)
        rows = row.new_empty(prod(axis.axis.size for axis in self._axes), len(row))
        self._submit(partial(all_gather_steps, row, rows.view(-1), self._axes)).wait()
        lines = cast("list[list[int]]", rows.tolist())  # pyright: ignore[reportUnknownMemberType]
        places = [
            _Place(line[0], line[1], line[2], bytes(filter(None, line[3:])).decode())
            for line in lines
        ]
        return sorted({place for place in places if place.entry})


class _Place(NamedTuple):
    """rank: global; group: which one of those that are compared; number: of the entry that differs,
    in the rank's record; entry: what is there."""

    rank: int
    group: int
    number: int
    entry: str


def _describe_setting(ranks_of: Mapping[str, Sequence[int]]) -> str:
    """Say which ranks have which setting. ranks_of: of an entry."""
    texts = {entry.removeprefix(_SETTING): name_ranks(ranks) for entry, ranks in ranks_of.items()}
    names = {text.partition(": ")[0] for text in texts}
    if len(names) == 1:
        parts = [f"{text.partition(': ')[2]} on {ranks}" for text, ranks in texts.items()]
    else:
        names = {"what an optimizer is set to"}
        parts = [f"'{text}' on {ranks}" for text, ranks in texts.items()]
    return (
        f"{names.pop()} is {' and '.join(parts)}; change the optimizer's settings alike on every "
        "rank, as by a scheduler that each of them steps"
    )


def _first_difference(extremes: torch.Tensor) -> int | None:
    """The first index at which largest and (negated) smallest differ; None: there is none."""
    differs = (extremes[0] != -extremes[1]).nonzero()
    return int(differs[0]) if len(differs) else None
