# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Streams whole parameters unit by unit; the next unit is gathered while the caller has one."""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from megatron_asynchzp.engine.comm.arena import Place
from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    finished,
    gather_for_steps,
)
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.zero.marks import unpacked
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError


class WholeUnit(NamedTuple):
    """The whole parameters of a unit."""

    unit: HZPUnit
    params: list[tuple[str, torch.Tensor]]  # name and value, in the order of the layout
    changed: torch.Tensor | None = None  # packed bits of all elements (Marks); None: all changed

    def changed_in(self, index: int) -> torch.Tensor | None:
        """Return which elements of parameter `index` may have changed: bool, of its shape."""
        piece = self.unit.layout.slices[index]
        return None if self.changed is None else unpacked(self.changed, piece.range, piece.shape)


def mark(scheduler: StepScheduler, name: str) -> None:
    """Record from now on which elements change, for a stream since `name`.

    It replaces a mark of this name, and takes a bit per element of this rank's optimizer shard.
    """
    scheduler.check_between_steps("mark_weights()")
    scheduler.settle()
    for unit in scheduler.units:
        unit.marks.set(name)
    scheduler.gathers.note_written()


def drop_mark(scheduler: StepScheduler, name: str) -> None:
    scheduler.check_usable()
    check_mark(scheduler, name)
    scheduler.settle()
    for unit in scheduler.units:
        unit.marks.drop(name)


def check_mark(scheduler: StepScheduler, name: str) -> None:
    names = scheduler.units[0].marks.names  # all units have the same
    if name not in names:
        known = ", ".join(sorted(names)) or "none"
        raise ConfigurationError(f"no mark {name!r} of the weights; there are: {known}")


@torch.no_grad()
def stream_units(
    scheduler: StepScheduler,
    # Global ranks that get values, None for all. Other ranks yield nothing, and receive only bytes
    # that they pass on (see gather_for_steps).
    receivers: Collection[int] | None = None,
    # Of the values, cast from main parameters if trained; None: the bits the model computes with.
    dtype: torch.dtype | None = None,
    since: str | None = None,  # a mark; units without changes since then are left out
) -> Iterator[WholeUnit]:
    """Yield the whole parameters of all units, in the order in which the last step used them.

    Between two steps. Collective over the sharding groups: every rank has to exhaust it before any
    other call. Values are valid until the next unit.

        gather   | u0 | u1 |    | u2 |    | u3 |
        caller        | u0      | u1      | u2      memory for two units

    With a parameter shard size of 1 the model's own values are neither gathered nor copied. Raises
    ConfigurationError if a value was written to, or kept until its memory was reused.
    """
    scheduler.check_usable()
    if since is not None:
        check_mark(scheduler, since)
    driver = scheduler.driver
    with scheduler.streaming() as units:
        streamed = [
            _StreamedUnit(unit, receivers, dtype, since)
            for unit in units
            if since is None or unit.marks.may_have_changed(since)
        ]
        gathered = [unit for unit in streamed if unit.nbytes]
        for group in filter(None, (gathered[0::2], gathered[1::2])):
            nbytes = max(unit.nbytes for unit in group)
            with torch.inference_mode(False):  # threads write to it
                memory = torch.empty(nbytes, dtype=torch.uint8, device=group[0].unit.device)
            place = Place((0, nbytes), memory)
            for unit in group:
                unit.place = place
        num_begun = 0
        try:
            for index, unit in enumerate(streamed):
                for following in streamed[num_begun : index + 2]:
                    following.begin(driver)
                    num_begun += 1
                unit.wait()
                if unit.is_received:
                    yield unit.hand_out()
                    unit.check_unwritten()
        finally:
            for unit in streamed[:num_begun]:
                unit.wait()


class _StreamedUnit:
    place: Place  # shared with every second unit

    def __init__(
        self,
        unit: HZPUnit,
        receivers: Collection[int] | None,
        dtype: torch.dtype | None,
        since: str | None,
    ):
        self.unit = unit
        ranks, axes = unit.groups.ranks, unit.groups.unshard
        here = [index for index, r in enumerate(ranks) if receivers is None or r in receivers]
        source, dtype = unit.model_param, dtype or unit.dtype
        if dtype != unit.dtype and unit.is_trained and not unit.is_main_param_aliased:
            source, axes = unit.main_param, unit.groups.optim_gather_axes
        start = source.range.start
        self._values = _GatheredTensor(source.storage, start, axes, dtype, here, unit)
        self._parts = [self._values]
        self._bits: _GatheredTensor | None = None
        if since is not None and (bits := unit.marks.bits.get(since)) is not None:
            axes = unit.groups.optim_gather_axes
            start = unit.optim_range.start * bits.numel() // unit.optim_range.numel
            self._bits = _GatheredTensor(bits, start, axes, bits.dtype, here, unit)
            self._parts.append(self._bits)
        for part in self._parts[1:]:
            part.offset = self._values.nbytes
        self.is_received = unit.groups.topology.rank in here  # whether this rank gets the unit
        self.nbytes = sum(part.nbytes for part in self._parts)  # of memory to gather into
        self._task: Task | None = None
        self._version = 0

    def begin(self, driver: Driver) -> None:
        """Start to gather the unit, into memory that nothing reads any more."""
        if all(part.is_complete for part in self._parts):
            return
        # Also on ranks without a part in it, so that all have the same order of tasks.
        event = driver.device.record_event()
        axes = max((part.axes for part in self._parts), key=len)
        task = Task("gather", self.unit.name, axes, self._steps, ready=(event,))
        self._task = driver.submit(task)

    def _steps(self) -> Steps:
        last = None
        for part in self._parts:
            yield from finished(last)
            last = yield from part.steps(self._memory)
        return last

    @property
    def _memory(self) -> torch.Tensor | None:
        return self.place.storage if self.nbytes else None

    def wait(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.wait()

    def hand_out(self) -> WholeUnit:
        """Return the values for the caller."""
        if self.nbytes and self.place.is_viewed():
            raise ConfigurationError(
                f"{self.unit.name}: values of an earlier unit are still kept, and overwritten. "
                "Call clone() on values before the next unit is taken."
            )
        full = self._values.whole(self._memory)
        self._version = self._values.base_of(self._memory)._version
        params = list(zip(self.unit.param_names, self.unit.views_of(full), strict=True))
        changed = None if self._bits is None else self._bits.whole(self._memory)
        return WholeUnit(self.unit, params, changed)

    def check_unwritten(self) -> None:
        if self._values.base_of(self._memory)._version != self._version:
            raise ConfigurationError(
                f"{self.unit.name}: a whole value was written to, which is lost. Change values "
                "with model.load_state_dict() between two steps."
            )


class _GatheredTensor:
    offset = 0  # of the whole in the memory to gather into, in bytes

    def __init__(
        self,
        shard: torch.Tensor,  # this rank's part, 1-D
        start: int,  # of the part
        axes: Sequence[AxisGroup],  # from the sharding group's innermost axis on
        dtype: torch.dtype,  # of the whole
        receivers: Collection[int],  # ranks of the sharding group
        unit: HZPUnit,
    ):
        self._shard, self._start, self.axes, self._dtype = shard, start, axes, dtype
        self._device = unit.device  # the shard may be on the host
        num_ranks, rank = prod(line.axis.size for line in axes), unit.groups.topology.rank
        first = rank - rank % num_ranks
        self._receivers = [r for r in range(first, first + num_ranks) if r in receivers]
        self._is_for_all = len(self._receivers) == num_ranks
        self._is_as_sent = (shard.dtype, shard.device) == (dtype, self._device)
        self.is_complete = num_ranks == 1 and self._is_as_sent
        is_gathered = rank in self._receivers and not self.is_complete
        self.nbytes = num_ranks * shard.numel() * dtype.itemsize if is_gathered else 0

    def whole(self, memory: torch.Tensor | None) -> torch.Tensor:
        """Return all parts, 1-D, from the uint8 memory that they were gathered into."""
        base = self.base_of(memory)
        return base if not self.nbytes else base[self.offset :][: self.nbytes].view(self._dtype)

    def base_of(self, memory: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor that the whole views; torch counts writes to both."""
        return self._shard if memory is None or not self.nbytes else memory

    def steps(self, memory: torch.Tensor | None) -> Steps:
        shard = self._shard
        if self.is_complete or not self._receivers:
            return None
        full = self.whole(memory) if self.nbytes else None
        if full is None or not self._is_for_all:
            part = shard.to(self._device, self._dtype)
            return (yield from gather_for_steps(self._receivers, part, full, self.axes))
        if not self._is_as_sent:
            shard = full[self._start :][: shard.numel()].copy_(shard)
        return (yield from all_gather_steps(shard, full, self.axes))
