# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's collectives on flat tensors, one mesh axis at a time (law 2)."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.sharding.topology import MeshAxis


def _collective(name: str, name_before: str) -> Callable[..., Any]:
    """Return a flat collective of torch: 2.13 renamed them."""
    return getattr(dist, name, None) or getattr(dist, name_before)


all_gather_flat = _collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_flat = _collective("reduce_scatter_single", "reduce_scatter_tensor")


class Unfinished(NamedTuple):
    """Work that a task may leave for later."""

    work: Any = None  # the handle of the last collective
    then: Callable[[], object] | None = None  # to be done, on the device, after `work`
    holds: tuple[torch.Tensor, ...] = ()  # memory that is in use until then


Steps = Generator[Any, None, Unfinished | None]
"""A generator that issues collectives. It yields the handle (torch.distributed.Work) of each that
must be complete before the next step, and returns the work that is left."""


def followed_by(rest: Unfinished | None, action: Callable[[], object]) -> Unfinished:
    work, then, holds = rest or Unfinished()
    return Unfinished(work, action if then is None else lambda: (then(), action()), holds)


def holding(rest: Unfinished | None, *memory: torch.Tensor) -> Unfinished:
    work, then, holds = rest or Unfinished()
    return Unfinished(work, then, (*holds, *memory))


def completed(steps: Steps) -> Steps:
    yield from finished((yield from steps))


def finished(rest: Unfinished | None) -> Steps:
    work, then, _ = rest or Unfinished()
    if work is not None:
        yield work
    if then is not None:
        then()


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """A mesh axis and the process group along it, for one kind of operation."""

    axis: MeshAxis
    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # global ranks, in the order of the group


def ranks_along(axes: Sequence[AxisGroup]) -> tuple[int, ...]:
    """Return the sorted global ranks that an operation over `axes` connects with this rank."""
    return tuple(sorted({rank for axis in axes for rank in axis.ranks}))


def all_gather_steps(shard: torch.Tensor, full: torch.Tensor, axes: Sequence[AxisGroup]) -> Steps:
    """Gather `shard` over `axes`, innermost first in the list, into `full`, the outermost first.

    Then the slowest link carries the fewest bytes, and every intermediate result is a contiguous
    part of `full`, without further memory. Both are 1-D; `shard` may lie at its place in `full`.
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
    """Sum `full` (1-D) over `axes` into this rank's shard, the innermost axis first.

    Then the slowest link carries the fewest bytes. `shards` has a 1-D tensor for each axis, each
    smaller by the size of its axis; the last becomes this rank's shard of the sum.
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
    """Send parts of `sent` (1-D) to the ranks along `axis`, and receive theirs.

    The splits are the elements for or from each rank, in order; any may be 0.
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
    """Gather `shard` like all_gather_steps, but only for `receivers`, ranks of the sharding group.

    Along each axis a rank receives what it needs and, into temporary memory, what it passes on
    along the inner axes. `full` is None on ranks that are no receivers, and must not contain
    `shard`; `axes` begin with the group's innermost axis.
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
    for line in inner:
        length = full.numel() // line.axis.size
        full = full[line.axis.coordinate * length :][:length]
    return full


def _bring_steps(
    takers: Sequence[int], part: torch.Tensor, whole: torch.Tensor, line: AxisGroup
) -> Steps:
    """Send the `part` of each rank along an axis to `whole` of the coordinates `takers`."""
    ranks, last = range(line.axis.size), None
    if whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
        part = part.clone()  # it lies within its target
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
    """Allocate the `shards` (fp32) of reduce_scatter_steps.

    If `wire` is not fp32, they begin with a copy of `full` in it, for rounded_reduce_scatter_steps.
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
    """Cut `memory` (1-D, fp32, reduction_nbytes) into `full` of `numel` elements and `shards`."""
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
    for work in completed(steps):
        work.wait()


def all_reduce_steps(
    shard: torch.Tensor, axes: Sequence[AxisGroup], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Steps:
    last = None
    for axis_group in axes:
        yield from finished(last)
        last = Unfinished(dist.all_reduce(shard, op, group=axis_group.group, async_op=True))  # pyright: ignore[reportUnknownMemberType]
    return last


# ---- gradients that are sent in a shorter dtype and summed in fp32


def rounded_reduce_scatter_steps(
    full: torch.Tensor, axes: Sequence[AxisGroup], shards: Sequence[torch.Tensor]
) -> Steps:
    """Sum `full` like reduce_scatter_steps, but send it in the dtype of `shards[0]` (new_shards).

        rank 0   | a0 | a1 |          a0 b0 -> sum in fp32, in the order of the ranks
        rank 1   | b0 | b1 |    ->    a1 b1 -> sum in fp32

    Along each axis every rank's contribution, also its own, is rounded once; the sum is not.
    Received parts overwrite `full`, which is fp32 or of that dtype.
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
    """Sum `shard` (1-D, fp32 or `wire`) in place over `axes`, sent in `wire`.

    Every contribution is rounded before the sum in fp32, and the sum before it is sent, so all
    ranks get the same bits.
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
    """Sum the rows of `pieces`, in their order and in fp32; `free` is overwritten.

    An addition per row would be a launch per rank. torch.sum adds in another order, and cumsum in
    fp64 on a CPU. segment_reduce adds row by row in one kernel, in the dtype of its input. So as
    many columns as fit into `free` are cast to fp32 at a time.
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
