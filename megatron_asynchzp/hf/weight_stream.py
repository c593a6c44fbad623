# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the stream of a running Megatron model's weights in the names of transformers: what is
gathered, sent and converted when.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_asynchzp.at_rest.unit_stream import drop_mark, mark, refuse_unknown_mark
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.box_elements import ALL, BoxElements, Elements, join
from megatron_asynchzp.hf.contents import Job, jobs_in_order_of_use, match_keys
from megatron_asynchzp.hf.delivery import Parcel, deliver
from megatron_asynchzp.hf.described_boxes import (
    changed_elements_of,
    described_boxes,
    elements_of,
    unit_at,
)
from megatron_asynchzp.hf.held_boxes import Address, HeldBox, distinct_boxes
from megatron_asynchzp.hf.mapping import TensorRule, rules_of
from megatron_asynchzp.hf.megatron_arguments import read_arguments
from megatron_asynchzp.hf.routes import Holders, Routes, sharing_block
from megatron_asynchzp.mcore.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.whole_tensors import whole_marks, whole_unit
from megatron_asynchzp.weight_delta import WeightDelta
from megatron_asynchzp.zero.params import TRAINED_DTYPES
from megatron_asynchzp.zero.unit import HZPUnit

# Of the tensors that travel together, as long as one alone is not larger.
_TOGETHER_NBYTES = 64 << 20
type _Boxes = dict[int, list[HeldBox]]  # by the rank at the other end


def stream_weights(
    model: Sequence[Any],
    *,
    receivers: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Name in transformers and value of each tensor of a model that trains with --use-asynchzp, in
    order of use: embeddings, layers, final norm, output layer. Between two steps. Collective over
    the world: every rank calls it and takes all that it yields, which is nothing on ranks that
    do not receive.

    model: the chunks that Megatron's setup gives.
    receivers: global ranks that get every tensor, the same on all ranks. None: all.
    dtype: what values are rounded to before they are sent; None: as the model computes.
    vocab_size: rows of the embedding that are no padding, where Megatron's --vocab-size lacks.

    A tensor is the receiver's own, on the device of the model; what is no part of the embedding's
    padding has the bits that `asynchzp hf export` gives of a checkpoint of this step. A rank holds
    at a time, beside its shards: its part of one layer (or of what lies before or after all
    layers), 64 MiB or one tensor of what others sent, and one tensor in two copies. Together that
    is at most two units, a unit being a layer or an embedding without tensor parallelism.

    Raises ConfigurationError on all ranks, before anything is sent: for a model that has no
    mapping or other tensors than its mapping, within a step, and for ranks that ask for different
    things.
    """
    return WeightStream("stream_weights()", model, receivers, dtype, vocab_size).weights()


def mark_weights(model: Sequence[Any], name: str) -> None:
    """Record from now on which weights change, for stream_changes(model, since=name), as
    ShardedModel.mark_weights: on every rank, between two steps."""
    for chunk in _chunks(model):
        mark(chunk.runtime, name)


def forget_mark(model: Sequence[Any], name: str) -> None:
    """Record nothing for `name` any more. Raises ConfigurationError where it is no mark."""
    for chunk in _chunks(model):
        drop_mark(chunk.runtime, name)


def stream_changes(
    model: Sequence[Any],
    since: str,
    *,
    receivers: Collection[int] | None = None,
    vocab_size: int | None = None,
) -> Iterator[WeightDelta]:
    """Stream the deltas that turn what stream_weights gave at mark_weights(model, since) into what
    it gives now, bit for bit, by apply_delta. Tensors without a change do not come. Arguments and
    errors otherwise as for stream_weights; flags of what changed are converted as the values are,
    so that it takes up to three units of memory.

    Raises ConfigurationError on all ranks where one has no such mark.
    """
    stream = WeightStream("stream_changes()", model, receivers, None, vocab_size, since=since)
    return stream.changes()


class WeightStream:
    """Plan of a stream: what is sent to whom, agreed on by all ranks.

    what: the caller, for messages; since: a mark, for what changed since then; refuse: raises
    ConfigurationError or OSError for what else this rank refuses. Other arguments as for
    stream_weights.
    """

    def __init__(
        self,
        what: str,
        model: Sequence[Any],
        receivers: Collection[int] | None,
        dtype: torch.dtype | None,
        vocab_size: int | None,
        since: str | None = None,
        refuse: Callable[[], None] = lambda: None,
    ):
        self._what, self._rank = what, dist.get_rank()
        self._dtype, self._since = dtype, since
        wanted = tuple(range(dist.get_world_size()) if receivers is None else sorted(receivers))

        def own_part() -> tuple[list[HeldBox], Holders | None]:
            if not wanted or not set(wanted) <= set(range(dist.get_world_size())):
                raise ConfigurationError(
                    f"receivers = {list(wanted)}: give global ranks below {dist.get_world_size()}"
                )
            if dtype is not None and dtype not in TRAINED_DTYPES:
                raise ConfigurationError(f"dtype = {dtype}: weights are in fp32, bf16 or fp16")
            self._refuse_model(model)
            refuse()
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
        """own_part() of all ranks. Collective over the world. Raises ConfigurationError on all
        ranks where it does on one, and where they ask for different things."""
        problem = mine = None
        try:
            mine = own_part()
        except (ConfigurationError, OSError) as error:
            problem = str(error)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (problem, asked, mine))
        problems = [found for found, *_ in everyone if found is not None]
        if not problems and any(of_rank != asked for _, of_rank, _ in everyone):
            problems = ["ranks ask for different receivers, dtypes, marks or vocabularies"]
        if problems:
            raise ConfigurationError(f"{self._what}: {problems[0]}")
        return [part for *_, part in everyone]

    def _refuse_model(self, model: Sequence[Any]) -> None:
        for chunk in _chunks(model):
            chunk.runtime.refuse_use()
            if chunk.runtime.is_in_step:
                raise ConfigurationError("within a step: call it after optimizer.step()")
            if self._since is not None:
                refuse_unknown_mark(chunk.runtime, self._since)
            chunk.runtime.settle()

    @property
    def is_receiver(self) -> bool:
        return self._rank in self._routes.receivers

    def dtype_of(self, rule: TensorRule) -> torch.dtype:
        """Return the dtype in which the tensors of a rule are handed over."""
        return self._dtype or self._dtypes[self._keys[rule.key]]

    # Not under torch.no_grad(), which would keep what was yielded last while the next is made: what
    # is gathered asks for no gradient.

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See stream_weights."""
        for job, elements in self._delivered():
            yield from job.convert(self._joined(job, elements)[0], self.shape)

    def changes(self) -> Iterator[WeightDelta]:
        """See stream_changes."""
        for job, elements in self._delivered():
            whole, changed = self._joined(job, elements)
            flags = None if changed is None else dict(job.convert(changed, self.shape))
            for name, tensor in job.convert(whole, self.shape):
                delta = WeightDelta.of(name, tensor, None if flags is None else flags[name])
                if delta.values.numel():
                    yield delta

    def _delivered(self) -> Iterator[tuple[Job, Elements]]:
        """Each job in order of use with the elements of its tensor, which the caller takes out;
        none where this rank does not receive."""
        exchanges = self._exchanges()
        last_uses = {
            box.address[:2]: index
            for index, jobs in enumerate(exchanges)
            for box in self._boxes_to_gather(jobs)
        }
        units: dict[tuple[int, int], _Gathered] = {}
        for index, jobs in enumerate(exchanges):
            if _begun_in(self._model) != self._begun:
                raise ConfigurationError(
                    f"{self._what}: a step began before all weights were taken"
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
        """Return all jobs in order of use, cut into those whose tensors travel together."""
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
        """Yield boxes of units that this rank gathers, because it or a rank that gathers with it
        sends them or takes them itself."""
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

    def _gather(self, address: Address) -> "_Gathered":
        """The one place where values come from."""
        self._model[address.chunk].runtime.settle()
        unit = unit_at(self._model, address)
        marks = None if self._since is None else whole_marks(unit, self._since)
        return _Gathered(unit, whole_unit(unit), marks)

    # ---- boxes

    def _exchange(
        self, jobs: Sequence[Job], units: Mapping[tuple[int, int], "_Gathered"]
    ) -> Elements:
        """Send what others take from this rank. Where it receives, the elements of every box."""
        elements: Elements = {}
        sent: _Boxes = {}
        received: _Boxes = {}
        for box in self._boxes_of(jobs):
            sources = self._routes.sources(box.holders)
            takers = [taker for taker, source in sources.items() if source == self._rank]
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

    def _own_box(self, box: HeldBox, gathered: "_Gathered | None") -> BoxElements:
        dtype = self._dtype or box.dtype
        if gathered is None:  # nothing of the unit has changed
            return BoxElements.to_receive(box.numel, dtype, self._device, count=0)
        values = elements_of(box, gathered.unit, gathered.values).to(dtype)
        marks = gathered.marks
        return BoxElements.of(
            values, None if marks is None else changed_elements_of(box, gathered.unit, marks)
        )

    def _tell_counts(
        self, elements: Elements, sent: _Boxes, received: _Boxes
    ) -> dict[HeldBox, int]:
        """Tell how many elements come of each box that this rank receives."""
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
        """The tensor of a job as Megatron has it without tensor parallelism; see join."""
        boxes, size = self._boxes[job.rule.key, job.place], job.rule.megatron_size(self.shape)
        return join(elements, boxes, len(job.place), size)

    @property
    def _device(self) -> torch.device:
        return self._model[0].units[0].device


class _Gathered(NamedTuple):
    """values: of the whole unit, 1-D; marks: see whole_marks, None where all elements count."""

    unit: HZPUnit
    values: Tensor
    marks: Tensor | None


def _arguments() -> Any:
    """Return Megatron's arguments."""
    from megatron.training import get_args

    return get_args()


def _begun_in(model: Sequence[AsyncHZPDataParallel]) -> list[tuple[int, bool]]:
    """Return what a step's begin changes, whatever its number: one may be repeated."""
    return [(chunk.runtime.num_begun, chunk.runtime.is_in_step) for chunk in model]


def _chunks(model: Sequence[Any]) -> Sequence[AsyncHZPDataParallel]:
    """Raises ConfigurationError for what is not the model of a run with --use-asynchzp."""
    if isinstance(model, torch.nn.Module) or not all(
        isinstance(chunk, AsyncHZPDataParallel) for chunk in model
    ):
        raise ConfigurationError("the model is not the list of chunks of a run with --use-asynchzp")
    return model
