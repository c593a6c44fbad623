# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Streams the weights of a running Megatron model in the names of transformers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_asynchzp.engine.at_rest.unit_stream import check_mark, drop_mark, mark
from megatron_asynchzp.engine.zero.params import TRAINED_DTYPES
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.box_elements import ALL, BoxElements, Elements, join
from megatron_asynchzp.hf.delivery import Parcel, deliver
from megatron_asynchzp.hf.held_boxes import (
    Address,
    HeldBox,
    changed_elements_of,
    described_boxes,
    distinct_boxes,
    elements_of,
    unit_at,
)
from megatron_asynchzp.hf.mapping import Job, TensorRule, jobs_in_order_of_use, match_keys, rules_of
from megatron_asynchzp.hf.routes import Holders, Routes, sharing_block
from megatron_asynchzp.hf.shape import read_arguments
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.step.whole_tensors import whole_marks, whole_unit
from megatron_asynchzp.weight_delta import WeightDelta

# Most bytes of tensors that are sent together, unless a single one is larger.
_TOGETHER_NBYTES = 64 << 20
type _Boxes = dict[int, list[HeldBox]]  # by the rank at the other end


def stream_weights(
    model: Sequence[Any],
    *,
    receivers: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each tensor of a model that trains with --use-asynchzp.

    The names are those of transformers, in order of use: embeddings, layers, final norm, output
    layer. Call it between two steps. Collective over the world: every rank calls it and exhausts
    the iterator, which is empty on ranks that do not receive.

    The receiver owns the tensors, on the device of the model. Their bits are those that
    `asynchzp hf export` makes of a checkpoint of this step, except in rows of padding. In addition
    to its shards a rank holds its part of a layer (or of the tensors before or after all layers),
    64 MiB or one tensor from other ranks, and one tensor in two copies: together at most two units,
    a unit being a layer or an embedding without tensor parallelism.

    Args:
        model: The chunks that Megatron's setup gives.
        receivers: Global ranks that get every tensor, the same on all ranks; by default all.
        dtype: Values are rounded to it before they are sent; by default the model's.
        vocab_size: Rows of the embedding that are not padding, if Megatron has no --vocab-size.

    Raises:
        ConfigurationError: On all ranks, before anything is sent: the model has no mapping or other
            tensors than its mapping, a step is in progress, or ranks ask for different things.
    """
    return WeightStream("stream_weights()", model, receivers, dtype, vocab_size).weights()


def mark_weights(model: Sequence[Any], name: str) -> None:
    """Record from now on which weights change, for stream_changes(model, since=name).

    Call it on every rank, between two steps. See ShardedModel.mark_weights.
    """
    for chunk in _chunks(model):
        mark(chunk.runtime, name)


def forget_mark(model: Sequence[Any], name: str) -> None:
    for chunk in _chunks(model):
        drop_mark(chunk.runtime, name)


def stream_changes(
    model: Sequence[Any],
    since: str,
    *,
    receivers: Collection[int] | None = None,
    vocab_size: int | None = None,
) -> Iterator[WeightDelta]:
    """Yield the changes of the weights since mark_weights(model, since).

    apply_delta turns the tensors that stream_weights gave then into those that it gives now, bit
    for bit. Unchanged tensors are left out. Takes up to three units of memory, because the masks of
    changes are converted as the values are.

    Other arguments and errors are those of stream_weights. All ranks raise ConfigurationError
    if one has no such mark.
    """
    stream = WeightStream("stream_changes()", model, receivers, None, vocab_size, since=since)
    return stream.changes()


class WeightStream:
    """The plan of a stream, on which all ranks agreed.

    `caller` names the public function in messages. With the mark `since` only changes are sent.
    `check` raises ConfigurationError or OSError for what else this rank refuses.
    """

    def __init__(
        self,
        caller: str,
        model: Sequence[Any],
        receivers: Collection[int] | None,
        dtype: torch.dtype | None,
        vocab_size: int | None,
        since: str | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self._caller, self._rank = caller, dist.get_rank()
        self._dtype, self._since = dtype, since
        wanted = tuple(range(dist.get_world_size()) if receivers is None else sorted(receivers))

        def own_part() -> tuple[list[HeldBox], Holders | None]:
            if not wanted or not set(wanted) <= set(range(dist.get_world_size())):
                raise ConfigurationError(
                    f"receivers = {list(wanted)}: give global ranks below {dist.get_world_size()}"
                )
            if dtype is not None and dtype not in TRAINED_DTYPES:
                raise ConfigurationError(f"dtype = {dtype}: weights are in fp32, bf16 or fp16")
            self._check_model(model)
            check()
            read_arguments(_arguments(), vocab_size)
            dense = model[0].groups["dense"]
            return described_boxes(model), dense.ranks if dense.topology.rank == 0 else None

        everyone = self._agree((wanted, dtype, vocab_size, since), own_part)
        self._model: Sequence[AsyncHZPDataParallel] = model
        self.shape = read_arguments(_arguments(), vocab_size)
        boxes = distinct_boxes(box for described, _ in everyone for box in described)
        sizes = {key: held[0].size for key, held in boxes.items()}
        self._keys = match_keys("the model", sizes, self.shape)
        self._dtypes = {key: held[0].dtype for key, held in boxes.items()}
        self._boxes: dict[tuple[str, tuple[int, ...]], list[HeldBox]] = {}
        for rule in rules_of(self.shape):
            num_stacked = len(rule.stack(self.shape))
            for box in boxes[self._keys[rule.key]]:
                self._boxes.setdefault((rule.key, box.offset[:num_stacked]), []).append(box)
        self._routes = Routes(wanted, [replicas for _, replicas in everyone if replicas])
        self._begun = _begun_in(model)

    def _agree(self, asked: Any, own_part: Callable[[], Any]) -> list[Any]:
        """Return own_part() of all ranks. Collective over the world.

        All ranks raise ConfigurationError if own_part() does on one, or if they ask for different
        things.
        """
        problem = mine = None
        try:
            mine = own_part()
        except (ConfigurationError, OSError) as error:
            problem = str(error)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (problem, asked, mine))
        problems = [told for told, *_ in everyone if told is not None]
        if not problems and any(of_rank != asked for _, of_rank, _ in everyone):
            problems = ["ranks ask for different receivers, dtypes, marks or vocabularies"]
        if problems:
            raise ConfigurationError(f"{self._caller}: {problems[0]}")
        return [part for *_, part in everyone]

    def _check_model(self, model: Sequence[Any]) -> None:
        for chunk in _chunks(model):
            chunk.runtime.check_usable()
            if chunk.runtime.is_in_step:
                raise ConfigurationError("within a step: call it after optimizer.step()")
            if self._since is not None:
                check_mark(chunk.runtime, self._since)
            chunk.runtime.settle()

    @property
    def is_receiver(self) -> bool:
        return self._rank in self._routes.receivers

    def dtype_of(self, rule: TensorRule) -> torch.dtype:
        return self._dtype or self._dtypes[self._keys[rule.key]]

    # Gathered tensors require no gradient. torch.no_grad() would keep the last yielded tensor alive
    # while the next is made.

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for job, elements in self._delivered():
            yield from job.convert(self._joined(job, elements)[0], self.shape)

    def changes(self) -> Iterator[WeightDelta]:
        for job, elements in self._delivered():
            whole, changed = self._joined(job, elements)
            flags = None if changed is None else dict(job.convert(changed, self.shape))
            for name, tensor in job.convert(whole, self.shape):
                delta = WeightDelta.of(name, tensor, None if flags is None else flags[name])
                if delta.values.numel():
                    yield delta

    def _delivered(self) -> Iterator[tuple[Job, Elements]]:
        """Yield each job in order of use, on receivers, with elements for the caller to remove."""
        exchanges = self._exchanges()
        last_uses = {
            box.address[:2]: index
            for index, jobs in enumerate(exchanges)
            for box in self._boxes_to_gather(jobs)
        }
        units: dict[tuple[int, int], _UnitValues] = {}
        for index, jobs in enumerate(exchanges):
            if _begun_in(self._model) != self._begun:
                raise ConfigurationError(
                    f"{self._caller}: a step began before all weights were taken"
                )
            for box in self._boxes_to_gather(jobs):
                if box.address[:2] not in units:
                    units[box.address[:2]] = self._gather(box.address)
            elements = self._exchange(jobs, units)
            units = {unit: whole for unit, whole in units.items() if last_uses[unit] > index}
            for job in jobs if self.is_receiver else ():
                yield job, elements
            del elements  # before the next units are gathered

    def _exchanges(self) -> list[list[Job]]:
        """Return all jobs in order of use, in groups whose tensors are sent together."""
        exchanges: list[list[Job]] = []
        for _, jobs in groupby(jobs_in_order_of_use(self.shape), lambda job: job.part):
            filled = _TOGETHER_NBYTES
            for job in jobs:
                numel = job.rule.megatron_size(self.shape).numel()
                nbytes = numel * self.dtype_of(job.rule).itemsize
                if filled + nbytes > _TOGETHER_NBYTES:
                    exchanges.append([])
                    filled = 0
                exchanges[-1].append(job)
                filled += nbytes
        return exchanges

    def _boxes_of(self, jobs: Sequence[Job]) -> Iterator[HeldBox]:
        return (box for job in jobs for box in self._boxes[job.rule.key, job.place])

    # ---- units

    def _boxes_to_gather(self, jobs: Sequence[Job]) -> Iterator[HeldBox]:
        """Yield the boxes of units that this rank gathers.

        It, or a rank that gathers the unit with it, sends or keeps them.
        """
        for box in self._boxes_of(jobs):
            if self._rank not in box.holders:
                continue
            unit = unit_at(self._model, box.address)
            if self._since is not None and not unit.marks.may_have_changed(self._since):
                continue
            sizes = unit.groups.topology.sizes
            shared_by = sizes.param if self._since is None else sizes.optim
            together = sharing_block(box.holders, self._rank, shared_by)
            if self._routes.serves(box.holders, together):
                yield box

    def _gather(self, address: Address) -> "_UnitValues":
        self._model[address.chunk].runtime.settle()
        unit = unit_at(self._model, address)
        marks = None if self._since is None else whole_marks(unit, self._since)
        return _UnitValues(unit, whole_unit(unit), marks)

    # ---- boxes

    def _exchange(
        self, jobs: Sequence[Job], units: Mapping[tuple[int, int], "_UnitValues"]
    ) -> Elements:
        elements: Elements = {}
        sent: _Boxes = {}
        received: _Boxes = {}
        for box in self._boxes_of(jobs):
            sources = self._routes.sources(box.holders)
            takers = [to for to, source in sources.items() if source == self._rank]
            if takers:
                elements[box] = self._own_box(box, units.get(box.address[:2]))
            elif self.is_receiver:
                received.setdefault(sources[self._rank], []).append(box)
            for taker in takers:
                if taker != self._rank:
                    sent.setdefault(taker, []).append(box)
        counts = self._tell_counts(elements, sent, received) if self._since is not None else {}
        for box in (box for boxes in received.values() for box in boxes):
            dtype = self._dtype or box.dtype
            count = counts.get(box, ALL)
            elements[box] = BoxElements.to_receive(box.numel, dtype, self._device, count)
        deliver(
            [
                Parcel(source, receiver, tensor)
                for source, receiver, boxes in self._ways(sent, received)
                for box in boxes
                for tensor in elements[box].tensors()
            ]
        )
        return elements

    def _ways(self, sent: _Boxes, received: _Boxes) -> Iterator[tuple[int, int, list[HeldBox]]]:
        for taker, boxes in sent.items():
            yield self._rank, taker, boxes
        for source, boxes in received.items():
            yield source, self._rank, boxes

    def _own_box(self, box: HeldBox, gathered: "_UnitValues | None") -> BoxElements:
        dtype = self._dtype or box.dtype
        if gathered is None:  # no element of the unit has changed
            return BoxElements.to_receive(box.numel, dtype, self._device, count=0)
        values = elements_of(box, gathered.unit, gathered.values).to(dtype)
        marks = gathered.marks
        return BoxElements.of(
            values, None if marks is None else changed_elements_of(box, gathered.unit, marks)
        )

    def _tell_counts(
        self, elements: Elements, sent: _Boxes, received: _Boxes
    ) -> dict[HeldBox, int]:
        parcels, coming = [], dict[int, Tensor]()
        for source, receiver, boxes in self._ways(sent, received):
            counts = [elements[box].count if source == self._rank else 0 for box in boxes]
            parcels.append(Parcel(source, receiver, torch.tensor(counts, device=self._device)))
            if receiver == self._rank:
                coming[source] = parcels[-1].tensor
        deliver(parcels)
        return {
            box: count
            for source, boxes in received.items()
            for box, count in zip(boxes, coming[source].tolist(), strict=True)
        }

    def _joined(self, job: Job, elements: Elements) -> tuple[Tensor, Tensor | None]:
        """Return the tensor of a job without tensor parallelism, and its mask; see join."""
        boxes, size = self._boxes[job.rule.key, job.place], job.rule.megatron_size(self.shape)
        return join(elements, boxes, len(job.place), size)

    @property
    def _device(self) -> torch.device:
        return self._model[0].units[0].device


class _UnitValues(NamedTuple):
    unit: HZPUnit
    values: Tensor  # of the whole unit, 1-D
    marks: Tensor | None  # of whole_marks; None: all elements are sent


def _arguments() -> Any:
    from megatron.training import get_args

    return get_args()


def _begun_in(model: Sequence[AsyncHZPDataParallel]) -> list[tuple[int, bool]]:
    """Return values that change when a step begins, even if it repeats a step's number."""
    return [(chunk.runtime.num_begun, chunk.runtime.is_in_step) for chunk in model]


def _chunks(model: Sequence[Any]) -> Sequence[AsyncHZPDataParallel]:
    if isinstance(model, torch.nn.Module) or not all(
        isinstance(chunk, AsyncHZPDataParallel) for chunk in model
    ):
        raise ConfigurationError("the model is not the list of chunks of a run with --use-asynchzp")
    return model
