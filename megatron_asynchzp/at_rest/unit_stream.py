# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns whole parameters that leave the engine: unit after unit, the next one on its way while the
caller has this one.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from megatron_asynchzp.comm.arena import Place
from megatron_asynchzp.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    finished,
    gather_for_steps,
)
from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.marks import unpacked
from megatron_asynchzp.zero.step import StepScheduler
from megatron_asynchzp.zero.unit import HZPUnit


class WholeUnit(NamedTuple):
    """params: name and whole value of each parameter of `unit`, in the order of its layout.
    changed: packed bits of all elements of the layout, see Marks; None where all count as changed.
    """

    unit: HZPUnit
    params: list[tuple[str, torch.Tensor]]
    changed: torch.Tensor | None = None

    def changed_in(self, index: int) -> torch.Tensor | None:
        """Which elements of parameter number `index` may have changed: bool, of its shape."""
        piece = self.unit.layout.slices[index]
        return None if self.changed is None else unpacked(self.changed, piece.range, piece.shape)


def mark(scheduler: StepScheduler, name: str) -> None:
    """From now on record which elements of the parameters change, for a stream since `name`. A mark
    of this name is forgotten. A bit per element that this rank's optimizer owns."""
    scheduler.between_steps("mark_weights()")
    scheduler.settle()
    for unit in scheduler.units:
        unit.marks.set(name)
    scheduler.gathers.note_written()


def drop_mark(scheduler: StepScheduler, name: str) -> None:
    """Record nothing for `name` any more."""
    scheduler.refuse_use()
    refuse_unknown_mark(scheduler, name)
    scheduler.settle()
    for unit in scheduler.units:
        unit.marks.drop(name)


def refuse_unknown_mark(scheduler: StepScheduler, name: str) -> None:
    """Before changes since `name` are taken."""
    names = scheduler.units[0].marks.names  # all units have the same
    if name not in names:
        known = ", ".join(sorted(names)) or "none"
        raise ConfigurationError(f"no mark {name!r} of the weights; there are: {known}")


@torch.no_grad()
def stream_units(
    scheduler: StepScheduler,
    receivers: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    since: str | None = None,
) -> Iterator[WholeUnit]:
    """The whole parameters of all units, in the order in which the last step used them. Values are
    there until the next unit is taken. Between two steps; until it is exhausted or closed nothing
    else may be called. Collective over the sharding groups; a rank without values has to exhaust
    it, too.

        gather   | u0 | u1 |    | u2 |    | u3 |
        caller        | u0      | u1      | u2      memory for two units

    With a parameter shard size of 1 the model's own values are neither gathered nor copied.

    receivers: global ranks that get values, None for all. Another rank yields nothing, and gets
        no byte beside those that it has to pass on (see gather_for_steps).
    dtype: of the values, cast from the main parameters where they are trained; None for the bits
        that the model computes with.
    since: a mark; units of which nothing may have changed since then are left out.

    Raises ConfigurationError where a value was written to, or kept until its memory was reused.
    """
    scheduler.refuse_use()
    if since is not None:
        refuse_unknown_mark(scheduler, since)
    with scheduler.streaming() as units:
        yield from _stream(units, scheduler.driver, receivers, dtype, since)


def _stream(
    units: Sequence[HZPUnit],
    driver: Driver,
    receivers: Collection[int] | None,
    dtype: torch.dtype | None,
    since: str | None,
) -> Iterator[WholeUnit]:
    coming = [
        _StreamedUnit(unit, receivers, dtype, since)
        for unit in units
        if since is None or unit.marks.may_have_changed(since)
    ]
    gathered = [one for one in coming if one.nbytes]
    for some in filter(None, (gathered[0::2], gathered[1::2])):
        nbytes = max(one.nbytes for one in some)
        with torch.inference_mode(False):  # threads write to it
            memory = torch.empty(nbytes, dtype=torch.uint8, device=some[0].unit.device)
        place = Place((0, nbytes), memory)
        for one in some:
            one.place = place
    num_begun = 0
    try:
        for index, one in enumerate(coming):
            for other in coming[num_begun : index + 2]:
                other.begin(driver)
                num_begun += 1
            one.wait()
            if one.is_received:
                yield one.yield_unit(patiently=not driver.device.runs_ahead)
                one.refuse_writes()
    finally:
        for one in coming[:num_begun]:
            one.wait()


class _StreamedUnit:
    """A unit of a stream.

    is_received: whether this rank gets it.
    nbytes: of memory that it is gathered into, 0 for none.
    place: with that memory, which another unit has had before.
    """

    place: Place

    def __init__(
        self,
        unit: HZPUnit,
        receivers: Collection[int] | None,
        dtype: torch.dtype | None,
        since: str | None,
    ):
        self.unit = unit
        ranks, axes = unit.groups.ranks, unit.groups.unshard
        asking = [one for one, rank in enumerate(ranks) if receivers is None or rank in receivers]
        source, dtype = unit.model_param, dtype or unit.dtype
        if dtype != unit.dtype and unit.is_trained and not unit.is_main_param_aliased:
            source, axes = unit.main_param, unit.groups.optim_gather_axes
        start = source.range.start
        self._values = _GatheredTensor(source.storage, start, axes, dtype, asking, unit)
        self._parts = [self._values]
        self._bits: _GatheredTensor | None = None
        if since is not None and (bits := unit.marks.bits.get(since)) is not None:
            axes = unit.groups.optim_gather_axes
            start = unit.optim_range.start * bits.numel() // unit.optim_range.numel
            self._bits = _GatheredTensor(bits, start, axes, bits.dtype, asking, unit)
            self._parts.append(self._bits)
        for part in self._parts[1:]:
            part.offset = self._values.nbytes
        self.is_received = unit.groups.topology.rank in asking
        self.nbytes = sum(part.nbytes for part in self._parts)
        self._task: Task | None = None
        self._version = 0

    def begin(self, driver: Driver) -> None:
        """Begin to gather it, into memory that nothing reads any more."""
        if all(part.is_there for part in self._parts):
            return
        # On ranks without a part in it as well: all have the same order of tasks.
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
        """Return when it is gathered."""
        task, self._task = self._task, None
        if task is not None:
            task.wait()

    def yield_unit(self, patiently: bool) -> WholeUnit:
        """Return its values to the caller. patiently: see Place.is_viewed."""
        if self.nbytes and self.place.is_viewed(patiently):
            raise ConfigurationError(
                f"{self.unit.name}: values that were taken before are still kept, and overwritten; "
                "clone() them: they are there each until the next is taken"
            )
        full = self._values.whole(self._memory)
        self._version = self._values.held_in(self._memory)._version
        params = list(zip(self.unit.param_names, self.unit.views_of(full), strict=True))
        changed = None if self._bits is None else self._bits.whole(self._memory)
        return WholeUnit(self.unit, params, changed)

    def refuse_writes(self) -> None:
        """The caller takes the next unit."""
        if self._values.held_in(self._memory)._version != self._version:
            raise ConfigurationError(
                f"{self.unit.name}: a whole value was written to, which is lost; change values "
                "with model.load_state_dict() between two steps"
            )


class _GatheredTensor:
    """A flat tensor whose parts ranks hold.

    shard: this rank's part, 1-D, from element `start` on.
    axes: over which it becomes whole, from the innermost one of the sharding group on.
    dtype: of the whole.
    asking: ranks of the sharding group that get the whole.
    offset: of the whole in the memory that it is gathered into, in bytes.

    is_there: whether this rank has the whole already; nbytes: of memory that the whole takes here.
    """

    offset = 0

    def __init__(
        self,
        shard: torch.Tensor,
        start: int,
        axes: Sequence[AxisGroup],
        dtype: torch.dtype,
        asking: Collection[int],
        unit: HZPUnit,
    ):
        self._shard, self._start, self.axes, self._dtype = shard, start, axes, dtype
        self._device = unit.device  # the shard may be on the host
        num_ranks, rank = prod(one.axis.size for one in axes), unit.groups.topology.rank
        first = rank - rank % num_ranks
        self._asking = [one for one in range(first, first + num_ranks) if one in asking]
        self._is_for_all = len(self._asking) == num_ranks
        self._is_as_sent = (shard.dtype, shard.device) == (dtype, self._device)
        self.is_there = num_ranks == 1 and self._is_as_sent
        is_gathered = rank in self._asking and not self.is_there
        self.nbytes = num_ranks * shard.numel() * dtype.itemsize if is_gathered else 0

    def whole(self, memory: torch.Tensor | None) -> torch.Tensor:
        """All parts, 1-D, where this rank has them. memory: it was gathered into, 1-D, uint8."""
        held = self.held_in(memory)
        return held if not self.nbytes else held[self.offset :][: self.nbytes].view(self._dtype)

    def held_in(self, memory: torch.Tensor | None) -> torch.Tensor:
        """Return what the whole is a view of; torch counts writes to either, but in inference."""
        return self._shard if memory is None or not self.nbytes else memory

    def steps(self, memory: torch.Tensor | None) -> Steps:
        """Make it whole on the ranks that ask for it."""
        shard = self._shard
        if self.is_there or not self._asking:
            return None
        full = self.whole(memory) if self.nbytes else None
        if full is None or not self._is_for_all:
            part = shard.to(self._device, self._dtype)
            return (yield from gather_for_steps(self._asking, part, full, self.axes))
        if not self._is_as_sent:
            shard = full[self._start :][: shard.numel()].copy_(shard)
        return (yield from all_gather_steps(shard, full, self.axes))
