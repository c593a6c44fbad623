# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the parameters that other ranks were sent with the main parameters.

[Note: compared with what was sent] Parameters travel before their update, and other code may write
to them afterwards. Counters of writes and noted settings can be bypassed, the bits cannot. So each
rank keeps a fingerprint of its sent O range, and compares it with what it would send now:

    after an update    units that were sent before it: one that differs on any rank is sent again
    at a use           all units: one that differs was written to, which is refused

On a CPU the host reads the answer at once. A host that runs ahead of a device reads it at the end
of the next step, and before anything is saved, and a difference ends the run.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    Steps,
    all_reduce_steps,
    followed_by,
)
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.order_check import submit_comparison
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.sharding.value_hash import forget_weights
from megatron_asynchzp.engine.zero.early_update import EarlySends
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

_WRITTEN, _WRITTEN_IN_USE = (
    "{}: the values of the optimizer's parameters were written where other ranks do not see it; "
    "write them within sharded.changing_params(), which sends them",
    "{}: its parameters were written to in a forward, as by .data, which is lost where they are in "
    "shards; compute with new values instead (self.weight * mask), or change them between steps "
    "with model.load_state_dict()",
)
_NOT_AS_SENT = (
    "step {}: {} was sent before the update, whose result differs, because code changed gradients, "
    "states or settings of the optimizer otherwise than by clipping. Switch early updates off "
    "(--asynchzp-early-update off)"
)


class SentCheck:
    """The comparisons of a model chunk."""

    def __init__(
        self,
        units: Sequence[HZPUnit],
        driver: Driver,
        axes: Sequence[AxisGroup],
        early_sends: EarlySends,
        await_sync: Callable[[HZPUnit], None],
    ):
        self._units = list(units)
        self._driver, self._axes = driver, axes
        self._early_sends, self._await_sync = early_sends, await_sync
        self._is_enabled = False
        self._index = {unit: index for index, unit in enumerate(self._units)}
        self._device = units[0].device
        self._explain: Callable[[], None] = lambda: None
        forget_weights()  # so that a process that builds several models runs each alike
        self._task: Task | None = None
        self._copied: Any = None  # event after which _written_answer can be read
        self._is_copying = False
        self._last_use: Any = None  # event after the last write to _written

    # A number for each unit, made when they are needed first.

    @cached_property
    def _differs(self) -> torch.Tensor:
        return torch.zeros(len(self._units), dtype=torch.int64, device=self._device)

    @cached_property
    def _written(self) -> torch.Tensor:
        return torch.zeros(len(self._units), dtype=torch.int64, device=self._device)

    @cached_property
    def _answer(self) -> torch.Tensor:
        return self._driver.device.new_host_memory((len(self._units),), torch.int64)

    @cached_property
    def _written_answer(self) -> torch.Tensor:
        return self._driver.device.new_host_memory((len(self._units),), torch.int64)

    def states(self) -> list[torch.Tensor]:
        return [vars(self)[name] for name in ("_differs", "_written") if name in vars(self)]

    # ---- writes of other code

    def enable_write_checks(self, explain: Callable[[], None]) -> None:
        """Refuse from now on, at the next use, writes of other code to main parameters.

        All ranks have main_param's present values. `explain` is called before a write is refused,
        and may raise an error that knows more.
        """
        self._is_enabled, self._explain = True, explain
        for unit in self._units:
            if unit.is_trained:
                unit.sent_record.note_sent()
                unit.sent_record.note_expected(is_as_sent=True)
                unit.sent_record.is_watched = True

    def note_update(self, current: Collection[HZPUnit], updated: set[HZPUnit] | None) -> None:
        """Note that the engine sends the update of `updated` (None: any) now, but for `current`."""
        for unit in self._units if self._is_enabled else ():
            if unit.is_trained and not unit.is_main_param_away:
                unit.sent_record.note_expected(is_as_sent=unit in current)
                if updated is None or unit in updated:
                    unit.sent_record.note_update()

    def check_unwritten(self, unit: HZPUnit) -> None:
        """Check at a use of `unit` that its main parameters are what the last update made."""
        if not (self._is_enabled and unit.is_trained) or unit in self._early_sends.units:
            return
        if unit.is_main_param_away:  # no other code finds it on the host
            return
        if unit.groups.topology.world_size > 1 or not unit.is_main_param_aliased:
            self._await_sync(unit)
            self._refuse(unit, unit.sent_record.was_written())

    def check_unwritten_in_use(self, unit: HZPUnit) -> None:
        """Check after a call that its modules wrote nothing to the parameters of `unit`."""
        if self._is_enabled and unit.is_unsharded and unit not in self._early_sends.units:
            self._await_sync(unit)
            self._refuse(unit, unit.sent_record.was_written_in_use(), in_use=1)

    def check_unwritten_at_rest(self, with_content: bool) -> None:
        """Check that no code set param.data between two steps, which no hook notices."""
        for unit in () if self._is_enabled else self._units:
            if unit.sent_record.was_replaced_at_rest(with_content):
                raise ConfigurationError(
                    f"{unit.name}: the data of its parameters was set or filled between two steps, "
                    "which is lost where they are in shards; change weights before the model is "
                    "wrapped, or in the checkpoint that is loaded"
                )

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

    def already_current(self) -> list[HZPUnit]:
        """Return the units whose early sends equal the update's result. Collective."""
        sent, update = self._early_sends.current_units, self._early_sends.early_update
        if update is None or not sent:
            return []
        self.compare(sent)
        if self._driver.device.runs_ahead and not update.is_awaited:
            return sent
        differing = self.differing()
        return [unit for unit in sent if unit not in differing]

    def compare(self, sent: Collection[HZPUnit]) -> None:
        """Begin to compare `sent` with the update's result, on all ranks. Collective."""
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

        self._task = submit_comparison(self._driver, "what was sent", self._axes, steps)

    def differing(self) -> list[HZPUnit]:
        """Return the units of the last `compare` that differ on any rank; holds the host."""
        if self._task is None:
            return []
        task, self._task = self._task, None
        task.await_usable()
        self._driver.await_event(task.event)
        return self._named_in(self._answer)

    # ---- where the host runs ahead

    def send_answers(self) -> None:
        """Let the findings of this step travel to the host, and read those of the last step."""
        self.finish()
        if self._driver.device.runs_ahead and "_written" in vars(self):
            self._read_written()
            self._driver.device.wait_event(self._last_use)
            self._written_answer.copy_(self._written, non_blocking=True)
            self._copied, self._is_copying = self._driver.device.record_event(), True

    def settle(self) -> None:
        self.send_answers()
        self._read_written()

    def finish(self) -> None:
        step = self._task.step if self._task is not None else 0
        if differing := self.differing():
            self._fail(ConfigurationError(_NOT_AS_SENT.format(step, differing[0].name)))

    def _read_written(self) -> None:
        if not self._is_copying:
            return
        self._is_copying = False
        self._driver.await_event(self._copied)
        if written := self._named_in(self._written_answer):
            first = written[0]
            self._fail_as_written(first, int(self._written_answer[self._index[first]]) >> 1)

    def _fail_as_written(self, unit: HZPUnit, in_use: int) -> NoReturn:
        error = ConfigurationError((_WRITTEN_IN_USE if in_use else _WRITTEN).format(unit.name))
        try:
            if not in_use:
                self._explain()
        except ConfigurationError as known:
            error = known
        # Ranks that wrote nothing wait for this one: tell them.
        self._fail(error, ())

    def _fail(self, error: ConfigurationError, suspect: tuple[()] | None = None) -> NoReturn:
        self._driver.fail(error, suspect)  # what was computed since is of no use
        raise error

    def _named_in(self, answer: torch.Tensor) -> list[HZPUnit]:
        numbers = cast("list[int]", answer.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [unit for unit, number in zip(self._units, numbers, strict=True) if number]
