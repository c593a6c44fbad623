# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that travel in bf16 and are summed in fp32, and are kept in fp32 or bf16: against what
one process computes, and the bytes that were sent.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import run_steps, split_for_reduction
from megatron_asynchzp.engine.sharding.layout import grad_pieces
from megatron_asynchzp.engine.sharding.topology import MeshAxis, ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.taken_grads import pack_grads, places_of
from megatron_asynchzp.engine.zero.unit import HZPUnit
from scripts.testbed.counters import total
from scripts.testbed.ranks import run_ranks
from tests.support.engine import cut_sizes, nested_sizes, shard_groups
from tests.support.fabric import replace_default_group

MICRO_BATCHES, SCALE, SLOT_NBYTES = 2, 0.25, 2048


def gradients_of(rank: int, numel: int, micro_batch: int) -> torch.Tensor:
    """fp32 numbers that bf16 cannot hold, of sizes so far apart that also after rounding to it
    hardly a sum is exact in fp32: it depends on the order."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    sizes = torch.randint(-12, 13, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 2.0**sizes


def reduce_unit(
    sizes: tuple[int, int, int], dtype: torch.dtype, numel: int, kept: torch.dtype = torch.float32
) -> HZPUnit:
    """A unit after a step of MICRO_BATCHES, whose gradients travelled in `dtype`, and were added to
    those of the micro-batch before in `kept`."""
    groups = replace(shard_groups(sizes), grad_dtype=dtype, main_grad_dtype=kept)
    unit = HZPUnit("toy", [("weight", torch.nn.Parameter(torch.zeros(numel)))], groups)
    for micro_batch in range(MICRO_BATCHES):
        full = torch.zeros(unit.layout.padded_numel)
        full[:numel] = gradients_of(dist.get_rank(), numel, micro_batch)
        if unit.reduces_in_place:
            unit.main_grad.storage.add_(full)
        else:
            for piece in grad_pieces(unit.layout, sizes[1], SLOT_NBYTES):
                nbytes = unit.reduction_nbytes(piece)
                packed, shards = split_for_reduction(
                    torch.empty(nbytes // 4), piece.numel, groups.grad_reduce, dtype
                )
                pack_grads(piece, {0: full[:numel]}, places_of(unit, piece, packed))
                own = unit.main_grad.storage[slice(*piece.part)]
                run_steps(unit.reduce_steps(packed, shards, own))
    run_steps(unit.sync_grad_steps(SCALE))
    return unit


# ---- the same in one process


def reduced(vectors: list[torch.Tensor], axes: list[Sequence[MeshAxis]]) -> list[torch.Tensor]:
    """The shards of all ranks after reduce-scatters over `axes`, which are listed for each rank:
    along each, every contribution is rounded once and added in the order of the ranks."""
    for along in zip(*axes, strict=True):
        sums = []
        for axis in along:
            pieces = [vectors[member].bfloat16().chunk(axis.size) for member in axis.members]
            result = pieces[0][axis.coordinate].float()
            for piece in pieces[1:]:
                result = result + piece[axis.coordinate].float()
            sums.append(result)
        vectors = sums
    return vectors


def expected_shards(
    sizes: tuple[int, int, int], world_size: int, numel: int, padded: int, kept_in: torch.dtype
) -> list:
    """What each rank's optimizer shard is to hold."""
    ranks = range(world_size)
    places = [ShardTopology(world_size, rank, ShardSizes(*sizes)) for rank in ranks]
    main = [torch.zeros(padded // sizes[1]) for _ in ranks]
    for micro_batch in range(MICRO_BATCHES):
        vectors = [torch.zeros(padded) for _ in ranks]
        for rank in ranks:
            vectors[rank][:numel] = gradients_of(rank, numel, micro_batch)
        shards = reduced(vectors, [place.grad_axes for place in places])
        sums = [kept + new for kept, new in zip(main, shards, strict=True)]
        main = [one.to(kept_in).float() for one in sums]
    main = reduced(main, [place.grad_sync_axes for place in places])
    results = main
    for rank, place in enumerate(places):
        for axis in place.replica_axes:
            result = main[axis.members[0]].bfloat16().float()
            for member in axis.members[1:]:
                result = result + main[member].bfloat16().float()
            results = [*results[:rank], result.bfloat16().float(), *results[rank + 1 :]]
    return [(result * SCALE).to(kept_in) for result in results]


def compare_with_one_process(all_sizes: list[tuple[int, int, int]], numel: int) -> int:
    for sizes, kept in product(all_sizes, (torch.float32, torch.bfloat16)):
        unit = reduce_unit(sizes, torch.bfloat16, numel, kept)
        padded = unit.layout.padded_numel
        expected = expected_shards(sizes, dist.get_world_size(), numel, padded, kept)
        own = unit.main_grad.view(unit.optim_range)
        assert own.dtype == kept and torch.equal(own, expected[dist.get_rank()]), sizes
    return len(all_sizes)


@pytest.mark.parametrize("world_size", [4, 6])
def test_every_contribution_is_rounded_once_and_the_sum_is_made_in_fp32(world_size):
    chains = nested_sizes(world_size) + cut_sizes(world_size)
    # A size that the ranks do not divide: the padding of shards and of the exchange is tested.
    assert (
        run_ranks(compare_with_one_process, world_size, chains, 101) == [len(chains)] * world_size
    )


# ---- bytes


def sent_nbytes(all_sizes: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Bytes that this rank sent for gradients, in fp32 and in bf16, for each of the sizes."""
    network = replace_default_group()
    found = []
    for sizes in all_sizes:
        shard_groups(sizes)
        pair = []
        for dtype in (torch.float32, torch.bfloat16):
            before = network.counters.snapshot()
            reduce_unit(sizes, dtype, 960)
            gained = network.counters.since(before)
            pair.append(total(gained.values()).wire_nbytes)
        found.append((pair[0], pair[1]))
    return found


def test_exactly_half_the_bytes_are_sent():
    for found in run_ranks(sent_nbytes, 4, nested_sizes(4)):
        assert found[-1][0] > 0
        assert all(fp32 == 2 * bf16 for fp32, bf16 in found)
