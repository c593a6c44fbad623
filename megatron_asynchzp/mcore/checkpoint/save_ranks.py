# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Decides which ranks write and read which parts of a shared checkpoint.

[Note: fewer and longer runs]
Cut over all ranks, each tensor of a checkpoint has as many parts as there are ranks, and each part
is an entry of the index, which every rank reads in a load. So at most `--asynchzp-save-ranks` of
the ranks that share a unit's optimizer states write it. Members of the outermost axis hold adjacent
runs of elements (see topology.shard_range), which are joined. Members take turns by unit, so each
writes about as much as it holds. Runs are joined on the host, where a writer copies them from a
device anyway, through two buffers of bounded size.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import AxisGroup, all_to_all_steps, run_steps
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.mcore.checkpoint.operation import current_save, is_shared_load
from megatron_asynchzp.mcore.start.units import units_by_groups

PARTS_OF_A_TENSOR = 64
"""How many ranks write each layer, tensor- and expert-parallel ones together, by default."""
EXCHANGE_NBYTES = 1 << 26
"""The most that one exchange sends from a rank, and brings to one."""


def is_read_here(unit: HZPUnit) -> bool:
    """Return whether this rank reads its part of the unit, instead of getting it from a replica."""
    return unit.groups.topology.replica_index == 0 or not is_shared_load()


def broadcast_to_replicas(unit: HZPUnit, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        on_device = tensor.to(unit.device)  # from the host, where it is held there
        for axis in unit.groups.replica_sync:
            dist.broadcast(on_device, axis.ranks[0], axis.group)
        if on_device is not tensor:
            tensor.copy_(on_device)


def most_writers(args: Namespace, groups: ShardGroups) -> int:
    """Return how many of the ranks that share a unit's optimizer states write it at most."""
    given = getattr(args, "asynchzp_save_ranks", None)
    if given is not None:
        return given
    beside = args.world_size // args.pipeline_model_parallel_size // groups.topology.world_size
    return max(1, PARTS_OF_A_TENSOR // max(1, beside))


def joined_along(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Return how many neighbours join along each axis (sizes, outermost first), for `most` runs."""
    left, factors = prod(sizes), []
    for size in sizes:
        # Of the divisors the smallest that is enough; the last is the size itself.
        enough = (
            factor for factor in range(1, size + 1) if size % factor == 0 and left // factor <= most
        )
        factors.append(next(enough, size))
        left //= factors[-1]
    return tuple(factors)


class Held(NamedTuple):
    """A rank's part of a state of a unit.

    values (1-D) of parameter `index` are the elements `part` of the unit's flat layout; replica is
    0 on the one rank that writes them.
    """

    index: int
    part: Range
    values: torch.Tensor
    replica: int


def held_part(unit: HZPUnit, index: int, values: torch.Tensor) -> Held:
    part = unit.layout.slices[index].range.intersect(unit.optim_range)
    return Held(index, part, values, unit.groups.topology.replica_index)


States = Mapping[str, Sequence[Held]]
"""What a rank has of a unit, by the name of the state."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of elements of a unit's state, and this rank's parts of it; turn gives its writer."""

    unit: HZPUnit
    name: str
    dtype: torch.dtype
    indices: tuple[int, ...]
    numel: int
    turn: int
    held: Sequence[Held]

    @property
    def range(self) -> Range:
        start = self.unit.optim_range.start // self.numel * self.numel
        return Range(start, start + self.numel)

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy elements [start, stop); elements of no rank (padding) stay as they are."""
        first = self.range.start
        wanted = Range(first + start, first + stop)
        for held in self.held:
            common = held.part.intersect(wanted)
            if common.numel:
                at = slice(*common.within(wanted))
                into[at].copy_(held.values[slice(*common.within(held.part))])


def runs_to_write(states: Mapping[HZPUnit, States]) -> Iterator[tuple[HZPUnit, str, Held]]:
    """Yield the runs of `states` that this rank writes; all their ranks have the same units.

    A shared save is collective over the ranks that share optimizer states; any other yields this
    rank's own.
    """
    save = current_save()
    for groups, units in units_by_groups(states).items():
        axes = tuple(reversed(groups.optim_gather_axes))
        factors = (1,) * len(axes)
        if save is not None and not save.is_local:
            most = most_writers(save.args, groups)
            factors = joined_along([axis.axis.size for axis in axes], most)
        if prod(factors) > 1:
            # The copies of the states take turns too. The others must not show theirs: Megatron
            # would take such a run, where it begins as a longer one does, for that one.
            topology = groups.topology
            mine = units[topology.replica_index :: topology.world_size // topology.sizes.optim]
            yield from _joined({unit: states[unit] for unit in mine}, axes, factors)
            continue
        for unit in units:
            for name, held in states[unit].items():
                yield from ((unit, name, part) for part in held)


def _joined(
    states: Mapping[HZPUnit, States], axes: Sequence[AxisGroup], factors: Sequence[int]
) -> Iterator[tuple[HZPUnit, str, Held]]:
    steps = [pair for pair in zip(axes, factors, strict=True) if pair[1] > 1]
    runs = list(_own_runs(states, [axis for axis, _ in steps]))
    for axis, factor in steps:
        runs = list(_exchange(runs, axis, factor))
    for run in runs:
        (joined,) = run.held
        for index in run.indices:
            part = run.unit.layout.slices[index].range.intersect(joined.part)
            if part.numel:
                values = joined.values[slice(*part.within(joined.part))]
                yield run.unit, run.name, Held(index, part, values, replica=0)


def _own_runs(states: Mapping[HZPUnit, States], axes: Sequence[AxisGroup]) -> Iterator[_Run]:
    """Yield this rank's runs, in an order in which neighbours go to different ranks."""
    units = list(states)
    kinds: dict[tuple[str, int], tuple[torch.dtype, set[int]]] = {}
    for number, unit in enumerate(units):
        for name, held in states[unit].items():
            if held:
                indices = {part.index for part in held}
                kinds[name, number] = (held[0].values.dtype, indices)
    for axis in axes:
        heard: list[dict] = [{} for _ in axis.ranks]
        dist.all_gather_object(heard, kinds, group=axis.group)
        kinds = {}
        for key, (dtype, indices) in (item for part in heard for item in part.items()):
            kinds.setdefault(key, (dtype, set()))[1].update(indices)
    for (name, number), (dtype, indices) in sorted(kinds.items(), key=lambda item: item[0]):
        unit = units[number]
        held, numel = states[unit].get(name, ()), unit.optim_range.numel
        yield _Run(unit, name, dtype, tuple(sorted(indices)), numel, number, held)


def _exchange(runs: Sequence[_Run], axis: AxisGroup, factor: int) -> Iterator[_Run]:
    """Join the runs of `factor` neighbours along an axis. Collective over the axis."""
    # All members have the same runs of the same lengths; each gets those whose turn it is.
    first = axis.axis.coordinate // factor * factor
    mine = axis.axis.coordinate - first
    results = [
        torch.empty(run.numel * factor, dtype=run.dtype) if run.turn % factor == mine else None
        for run in runs
    ]
    for pieces in _batches(runs, factor):
        _exchange_pieces([runs[number] for number, _, _ in pieces], pieces, results, axis, factor)
    for run, result in zip(runs, results, strict=True):
        if result is not None:
            joined = replace(run, numel=run.numel * factor, turn=run.turn // factor)
            yield replace(joined, held=[Held(0, joined.range, result, replica=0)])


_Piece = tuple[int, int, int]
"""Number of a run, and the elements [start, stop) of it."""


def _batches(runs: Sequence[_Run], factor: int) -> Iterator[list[_Piece]]:
    """Yield pieces that are sent at once: a rank sends and gets EXCHANGE_NBYTES at most."""
    batch: list[_Piece] = []
    sent, got = 0, [0] * factor
    for number, run in enumerate(runs):
        longest = max(1, EXCHANGE_NBYTES // factor // run.dtype.itemsize)
        for start in range(0, run.numel, longest):
            stop = min(run.numel, start + longest)
            nbytes, to = (stop - start) * run.dtype.itemsize, run.turn % factor
            if batch and max(sent + nbytes, got[to] + nbytes * factor) > EXCHANGE_NBYTES:
                yield batch
                batch, sent, got = [], 0, [0] * factor
            batch.append((number, start, stop))
            sent, got[to] = sent + nbytes, got[to] + nbytes * factor
    if batch:
        yield batch


def _exchange_pieces(
    runs: Sequence[_Run],
    pieces: Sequence[_Piece],
    results: Sequence[torch.Tensor | None],
    axis: AxisGroup,
    factor: int,
) -> None:
    device, coordinate = runs[0].unit.device, axis.axis.coordinate
    first = coordinate // factor * factor
    order = sorted(range(len(pieces)), key=lambda index: runs[index].turn % factor)
    nbytes = [(stop - start) * run.dtype.itemsize for run, (_, start, stop) in zip(runs, pieces)]
    sent = torch.zeros(sum(nbytes), dtype=torch.uint8, device=device)
    sent_splits, at = [0] * axis.axis.size, 0
    for index in order:
        run, (_, start, stop) = runs[index], pieces[index]
        piece = torch.zeros(stop - start, dtype=run.dtype, device=device)
        run.read(start, stop, piece)
        sent[at : at + nbytes[index]].copy_(piece.view(torch.uint8))
        sent_splits[first + run.turn % factor] += nbytes[index]
        at += nbytes[index]
    own = sent_splits[coordinate]
    received_splits = [
        own if first <= place < first + factor else 0 for place in range(axis.axis.size)
    ]
    received = torch.empty(own * factor, dtype=torch.uint8, device=device)
    run_steps(all_to_all_steps(received, received_splits, sent, sent_splits, axis))
    on_host, at = received.cpu(), 0
    for index in order:
        number, start, stop = pieces[index]
        result, itemsize = results[number], runs[index].dtype.itemsize
        if result is None:
            continue
        into = result.view(torch.uint8)
        for place in range(factor):
            begin = (place * runs[index].numel + start) * itemsize
            came = on_host[place * own + at :][: nbytes[index]]
            into[begin : begin + nbytes[index]].copy_(came)
        at += nbytes[index]
