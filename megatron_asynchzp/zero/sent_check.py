# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of what other ranks were sent of the parameters with what the main parameters
hold.

[Note: compared with what was sent] Parameters travel before their update, and whoever trains may
write to them afterwards. Counters of writes, settings that are noted and the like can be bypassed,
the bits cannot. So each rank keeps a fingerprint of what it sent of its O range, and compares it
with what it would send now:

    after an update    of units that were sent before it: one that differs on any rank is sent again
    at a use           of all units: one that differs was written to, which is refused

On a CPU the host reads the answer at once. Where it runs ahead of a device it reads it at the end
of the next step, and before anything is saved, and a difference ends the run.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from megatron_asynchzp.comm.collectives import AxisGroup, Steps, all_reduce_steps, followed_by
from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.fingerprint import forget_weights
from megatron_asynchzp.zero.unit import HZPUnit

_WRITTEN, _WRITTEN_IN_USE = (
    "{}: the values of the optimizer's parameters were written where other ranks do not see it; "
    "write them within sharded.changing_params(), which sends them",
    "{}: its parameters were written to in a forward, as by .data, which is lost where they are in "
    "shards; compute with new values instead (self.weight * mask), or change them between steps "
    "with model.load_state_dict()",
)
_NOT_AS_SENT = (
    "step {}: {} was sent before the update, which made something else of it: gradients, states or "
    "settings of the optimizer were changed otherwise than by clipping; set early updates off "
    "(--asynchzp-early-update off)"
)


class SentCheck:
    """The comparisons of one model chunk.

    units: of the chunk.
    axes: of their sharding groups, innermost first.

    explain: called before a write is refused; may raise an error that knows more of it.
    """

    def __init__(self, units: Sequence[HZPUnit], driver: Driver, axes: Sequence[AxisGroup]):
        self._units = list(units)
        self._driver, self._axes = driver, axes
        self._index = {unit: index for index, unit in enumerate(self._units)}
        self._where = units[0].device
        self.explain: Callable[[], None] = lambda: None
        forget_weights()  # so that a process that builds several models runs each alike
        self._task: Task | None = None
        self._copied: Any = None  # the event after which _written_answer can be read
        self._is_copying = False
        self._last_use: Any = None  # the event after which _written is as the last use left it

    # A number for each unit, made when they are needed first.

    @cached_property
    def _differs(self) -> torch.Tensor:
        return torch.zeros(len(self._units), dtype=torch.int64, device=self._where)

    @cached_property
    def _written(self) -> torch.Tensor:
        return torch.zeros(len(self._units), dtype=torch.int64, device=self._where)

    @cached_property
    def _answer(self) -> torch.Tensor:
        return self._driver.device.new_host_memory((len(self._units),), torch.int64)

    @cached_property
    def _written_answer(self) -> torch.Tensor:
        return self._driver.device.new_host_memory((len(self._units),), torch.int64)

    def states(self) -> list[torch.Tensor]:
        """Return the tensors that it has on the device between two steps."""
        return [vars(self)[name] for name in ("_differs", "_written") if name in vars(self)]

    # ---- at a use

    def refuse_write(self, unit: HZPUnit) -> None:
        """At a use of `unit`, whose shards are as they were sent last."""
        self._refuse(unit, unit.sent_record.was_written())

    def refuse_write_in_use(self, unit: HZPUnit) -> None:
        """After a call with `unit`, of what its modules wrote to the parameters they got."""
        self._refuse(unit, unit.sent_record.was_written_in_use(), in_use=1)

    def _refuse(self, unit: HZPUnit, differs: torch.Tensor | bool, in_use: int = 0) -> None:
        if isinstance(differs, torch.Tensor) and self._driver.device.runs_ahead:
            # Units may be used on several streams, in turns.
            self._driver.device.wait_event(self._last_use)
            place = self._written[self._index[unit]]
            place.add_((place == 0) * differs * (1 + in_use))  # the first says more
            self._last_use = self._driver.device.record_event()
        elif differs:
            self._fail_as_written(unit, in_use)

    # ---- after an update

    def compare(self, sent: Collection[HZPUnit]) -> None:
        """Begin to compare `sent` with what the update made, on all ranks. Collective."""
        self.finish()
        places = [self._index[unit] for unit in sent]
        for place, unit in zip(places, sent, strict=True):
            self._differs[place].copy_(unit.sent_record.differs_from_sent())
        differs, answer = self._differs, self._answer

        def steps() -> Steps:
            last = yield from all_reduce_steps(differs, self._axes, dist.ReduceOp.MAX)

            def end() -> None:
                answer.copy_(differs, non_blocking=True)
                differs.zero_()

            return followed_by(last, end)

        driver = self._driver
        after = [driver.latest.get(lane) for lane in ("reduce", "grad-sync")]
        ready = (driver.device.record_event(),)
        self._task = driver.submit(Task("order", "what was sent", self._axes, steps, ready, after))

    def differing(self) -> list[HZPUnit]:
        """Return the units of the last `compare` that differ on any rank; holds the host until all
        have compared."""
        if self._task is None:
            return []
        task, self._task = self._task, None
        task.await_usable()
        self._driver.await_event(task.event)
        return self._named_in(self._answer)

    # ---- where the host runs ahead

    def send_answers(self) -> None:
        """A step's gradients are complete: let what was found in it travel to the host, and read
        what travelled a step ago."""
        self.finish()
        if self._driver.device.runs_ahead and "_written" in vars(self):
            self._read_written()
            self._driver.device.wait_event(self._last_use)
            self._written_answer.copy_(self._written, non_blocking=True)
            self._copied, self._is_copying = self._driver.device.record_event(), True

    def settle(self) -> None:
        """Before anything is saved: hold the host until all comparisons are made."""
        self.send_answers()
        self._read_written()

    def finish(self) -> None:
        """Raises ConfigurationError, on all ranks, where the last comparison found a difference
        that was not asked for."""
        step = self._task.step if self._task is not None else 0
        if found := self.differing():
            self._fail(ConfigurationError(_NOT_AS_SENT.format(step, found[0].name)))

    def _read_written(self) -> None:
        if not self._is_copying:
            return
        self._is_copying = False
        self._driver.await_event(self._copied)
        if found := self._named_in(self._written_answer):
            self._fail_as_written(found[0], int(self._written_answer[self._index[found[0]]]) >> 1)

    def _fail_as_written(self, unit: HZPUnit, in_use: int) -> NoReturn:
        error = ConfigurationError((_WRITTEN_IN_USE if in_use else _WRITTEN).format(unit.name))
        try:
            if not in_use:
                self.explain()
        except ConfigurationError as known:
            error = known
        # Another rank may have written nothing, or own nothing, and wait for this one: it is told.
        self._fail(error, ())

    def _fail(self, error: ConfigurationError, suspect: tuple[()] | None = None) -> NoReturn:
        self._driver.fail(error, suspect)  # what was computed since is of no use
        raise error

    def _named_in(self, answer: torch.Tensor) -> list[HZPUnit]:
        numbers = cast("list[int]", answer.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [unit for unit, found in zip(self._units, numbers, strict=True) if found]
