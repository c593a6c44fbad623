# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the collectives of the engine on flat tensors, one mesh axis at a time (law 2)."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_asynchzp.sharding.topology import MeshAxis


def _collective(name: str, name_before: str) -> Callable[..., Any]:
    """torch 2.13 renamed the flat collectives; 2.11 and 2.12 have only the old names."""
    return getattr(dist, name, None) or getattr(dist, name_before)


all_gather_flat = _collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_flat = _collective("reduce_scatter_single", "reduce_scatter_tensor")


class Unfinished(NamedTuple):
    """Work that a task may leave for later.

    work: the handle of its last collective, None where it has none.
    then: an action that needs that one to be complete, on the device.
    holds: memory that it uses until then.
    """

    work: Any = None
    then: Callable[[], object] | None = None
    holds: tuple[torch.Tensor, ...] = ()


Steps = Generator[Any, None, Unfinished | None]
"""Issues collectives. Yields the handle, a torch.distributed.Work, of each that must be complete
before the next step; what is left at the end is returned, None where nothing is."""


def followed_by(left: Unfinished | None, action: Callable[[], object]) -> Unfinished:
    """Return `left` with `action` after it."""
    work, then, holds = left or Unfinished()
    return Unfinished(work, action if then is None else lambda: (then(), action()), holds)


def holding(left: Unfinished | None, *memory: torch.Tensor) -> Unfinished:
    """Return `left` with `memory` added to what it holds."""
    work, then, holds = left or Unfinished()
    return Unfinished(work, then, (*holds, *memory))


def completed(steps: Steps) -> Steps:
    """`steps` that leave nothing for later."""
    yield from finished((yield from steps))


def finished(left: Unfinished | None) -> Steps:
    """Finish what is `left`, now."""
    work, then, _ = left or Unfinished()
    if work is not None:
        yield work
    if then is not None:
        then()


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """A mesh axis and the process group along it, for one kind of operation.

    ranks: the global ranks of the group, in its order.
    """

    axis: MeshAxis
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


def ranks_along(axes: Sequence[AxisGroup]) -> tuple[int, ...]:
    """Global ranks, sorted, that an operation over `axes` connects with this one."""
    return tuple(sorted({rank for axis in axes for rank in axis.ranks}))


def all_gather_steps(shard: torch.Tensor, full: torch.Tensor, axes: Sequence[AxisGroup]) -> Steps:
    """Gather `shard` over `axes` (innermost first, as the topology lists them) into `full`.

    shard: 1-D, n elements.
    full: 1-D, n x product of the axis sizes, same dtype. The outermost axis is gathered first: over
        the slowest link travels the least, and every intermediate result is a contiguous part of
        `full`, so no memory is needed beside it. `shard` may already lie at its place in `full`;
        the first gather puts it there otherwise.
    """
    if not axes:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return None
    inner, outer = axes[0], axes[1:]
    if outer:
        length = full.numel() // inner.axis.size
        own = full[inner.axis.coordinate * length :][:length]
        yield from completed(all_gather_steps(shard, own, outer))
        shard = own
    return Unfinished(all_gather_flat(full, shard, group=inner.group, async_op=True))


def reduce_scatter_steps(
    full: torch.Tensor, axes: Sequence[AxisGroup], shards: Sequence[torch.Tensor]
) -> Steps:
    """Sum `full` over `axes`; the last of `shards` becomes this rank's shard of the sum.

    full: 1-D.
    shards: one 1-D tensor per axis, each smaller than the one before by the size of its axis. The
        innermost axis is reduced first: the slowest link carries the least.
    """
    last = None
    for axis_group, shard in zip(axes, shards, strict=True):
        yield from finished(last)
        last = Unfinished(reduce_scatter_flat(shard, full, group=axis_group.group, async_op=True))
        full = shard
    return last


def all_to_all_steps(
    received: torch.Tensor,
    received_splits: Sequence[int],
    sent: torch.Tensor,
    sent_splits: Sequence[int],
    axis: AxisGroup,
) -> Steps:
    """Send the parts of `sent` (1-D) to the ranks along `axis`, and fill `received` with theirs.

    splits: elements for or from each rank, in their order; any may be 0.
    """
    yield from ()
    return Unfinished(
        dist.all_to_all_single(  # pyright: ignore[reportUnknownMemberType]
            received, sent, list(received_splits), list(sent_splits), axis.group, async_op=True
        )
    )


def gather_for_steps(
    receivers: Collection[int],
    shard: torch.Tensor,
    full: torch.Tensor | None,
    axes: Sequence[AxisGroup],
) -> Steps:
    """As all_gather_steps, but only `receivers` (ranks of the sharding group) get all of it. `axes`
    begin with the innermost one of the group.

    full: None on all other ranks. Must not contain `shard`.

    Along each axis a rank gets what it needs itself, and what receivers with its coordinates along
    the outer axes need of it; the latter into memory of its own. Where there is no such receiver it
    gets nothing.
    """
    last, part, numel = None, shard, shard.numel()
    for depth in reversed(range(len(axes))):
        line = axes[depth]
        blocks = {rank // line.axis.stride for rank in receivers}
        takers = [i for i, m in enumerate(line.axis.members) if m // line.axis.stride in blocks]
        if not takers:
            break
        yield from finished(last)
        numel *= line.axis.size
        is_taker = line.axis.coordinate in takers
        whole = part.new_empty(numel if is_taker and full is None else 0)
        if is_taker and full is not None:
            whole = _own_part(full, axes[:depth])
        if len(takers) == line.axis.size:
            last = Unfinished(all_gather_flat(whole, part, group=line.group, async_op=True))
        else:
            last = yield from _bring_steps(takers, part, whole, line)
        if not is_taker:
            break
        part = whole
    return holding(last, part)


def _own_part(full: torch.Tensor, inner: Sequence[AxisGroup]) -> torch.Tensor:
    """Return the part of `full` of the ranks with this one's coordinates along the `inner` axes."""
    for one in inner:
        length = full.numel() // one.axis.size
        full = full[one.axis.coordinate * length :][:length]
    return full


def _bring_steps(
    takers: Sequence[int], part: torch.Tensor, whole: torch.Tensor, line: AxisGroup
) -> Steps:
    """Bring the `part` of each rank along an axis into `whole` of those with the coordinates
    `takers`; elsewhere `whole` is empty."""
    ranks, last = range(line.axis.size), None
    if whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
        part = part.clone()  # it lies within what it is written to
    for taker in takers:
        yield from finished(last)
        is_mine = taker == line.axis.coordinate
        received = [part.numel() if is_mine else 0 for _ in ranks]
        sent = [part.numel() if rank == taker else 0 for rank in ranks]
        into = whole if is_mine else whole[:0]
        last = yield from all_to_all_steps(into, received, part, sent, line)
    return holding(last, part)


def new_shards(
    full: torch.Tensor, axes: Sequence[AxisGroup], wire: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Memory, fp32, for the results of reduce_scatter_steps, the last of which is this rank's
    shard.

    wire: where it is not fp32, a copy of `full` in it comes first, which
    rounded_reduce_scatter_steps sends from.
    """
    is_rounded = wire != torch.float32 and axes
    shards = [full.new_empty(full.numel(), dtype=wire)] if is_rounded else []
    numel = full.numel()
    for axis_group in axes:
        numel //= axis_group.axis.size
        shards.append(full.new_empty(numel, dtype=torch.float32))
    return shards


def split_for_reduction(
    memory: torch.Tensor, numel: int, axes: Sequence[AxisGroup], wire: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Parts of `memory` (1-D, fp32, of reduction_nbytes) for `numel` elements to reduce, and for
    the results, as in new_shards."""
    full, offset = memory[:numel], numel
    shards: list[torch.Tensor] = []
    if axes and wire != torch.float32:
        offset += numel * wire.itemsize // memory.itemsize
        shards.append(memory[full.numel() : offset].view(wire))
    for axis_group in axes:
        numel //= axis_group.axis.size
        shards.append(memory[offset : offset + numel])
        offset += numel
    return full, shards


def run_steps(steps: Steps) -> None:
    """Issue and await every collective of `steps`, one after the other."""
    for work in completed(steps):
        work.wait()


def all_reduce_steps(
    shard: torch.Tensor, axes: Sequence[AxisGroup], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Steps:
    """Combine `shard` in place over `axes`, by `op`."""
    last = None
    for axis_group in axes:
        yield from finished(last)
        last = Unfinished(dist.all_reduce(shard, op, group=axis_group.group, async_op=True))  # pyright: ignore[reportUnknownMemberType]
    return last


# ---- gradients that travel in a shorter dtype than they are summed in


def rounded_reduce_scatter_steps(
    full: torch.Tensor, axes: Sequence[AxisGroup], shards: Sequence[torch.Tensor]
) -> Steps:
    """As reduce_scatter_steps, but what travels is rounded to the dtype of the first of `shards`.

        rank 0   | a0 | a1 |          a0 b0 -> sum in fp32, in the order of the ranks
        rank 1   | b0 | b1 |    ->    a1 b1 -> sum in fp32

    Along each axis every rank's contribution, its own included, is rounded once, and the sum is
    not. shards: see new_shards. `full` (fp32, or that dtype) is overwritten: what arrives needs its
    memory.
    """
    copy, results, last = shards[0], shards[1:], None
    for axis_group, result in zip(axes, results, strict=True):
        yield from finished(last)
        sent = copy[: full.numel()].copy_(full)
        received = full.view(copy.dtype)[: full.numel()]
        last = Unfinished(
            dist.all_to_all_single(received, sent, group=axis_group.group, async_op=True),  # pyright: ignore[reportUnknownMemberType]
            partial(_sum_pieces, received.view(axis_group.axis.size, -1), result, sent),
        )
        full = result
    return last


def rounded_all_reduce_steps(
    shard: torch.Tensor, axes: Sequence[AxisGroup], wire: torch.dtype
) -> Steps:
    """Sum `shard` (1-D, fp32 or `wire`) in place over `axes`; what travels is rounded to `wire`.

    Every contribution is rounded once before the sum in fp32, and the sum once more, because it
    travels too; so all ranks get the same bits.
    """
    last = None
    for axis_group in axes:
        yield from finished(last)
        size, coordinate = axis_group.axis.size, axis_group.axis.coordinate
        length = -(-shard.numel() // size)
        sent = shard.new_zeros(length * size, dtype=wire)
        sent[: shard.numel()].copy_(shard)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=axis_group.group, async_op=True)  # pyright: ignore[reportUnknownMemberType]
        total = shard.new_empty(length, dtype=torch.float32)
        _sum_pieces(received.view(size, length), total, sent)
        own = sent[coordinate * length :][:length].copy_(total)
        work = all_gather_flat(sent, own, group=axis_group.group, async_op=True)
        last = Unfinished(work, partial(shard.copy_, sent[: shard.numel()]))
    return last


_FEW_PIECES = 16


def _sum_pieces(pieces: torch.Tensor, result: torch.Tensor, free: torch.Tensor) -> None:
    """The sum of the rows of `pieces`, in their order and in fp32. free: is overwritten.

    An addition for each row is a launch for each rank of an axis. torch.sum adds in another order,
    and cumsum in fp64 on a CPU; segment_reduce adds row by row, on a CPU and in one kernel of CUDA,
    in the dtype that it reads: of as many columns at a time as `free` has room for in fp32.
    """
    size, room = len(pieces), free[: free.numel() // 2 * 2].view(torch.float32)
    width = room.numel() // size
    if size <= _FEW_PIECES or width == 0 or result.device.type not in ("cpu", "cuda"):
        result.copy_(pieces[0])
        for piece in pieces[1:]:
            result.add_(piece)
        return
    lengths = torch.full((1,), size, device=result.device)
    for start in range(0, len(result), width):
        columns = pieces[:, start : start + width]
        rows = room[: columns.numel()].view(columns.shape).copy_(columns)
        # Beginning with 0.0 would change -0.0.
        total = torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True, initial=-0.0)
        result[start : start + width].copy_(total[0])
