# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-axis collectives on real ranks: every nesting, against what one process computes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_asynchzp.engine.comm import collectives
from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    all_gather_steps,
    all_reduce_steps,
    new_shards,
    reduce_scatter_steps,
    run_steps,
)
from megatron_asynchzp.engine.sharding.topology import MeshAxis, ShardSizes
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.program import GATHER, REDUCE
from megatron_asynchzp.planner.traffic import Group, ring_of, unit_collectives
from scripts.testbed.counters import total
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import run_ranks
from tests.support.engine import cut_sizes, nested_sizes, shard_groups
from tests.support.fabric import replace_default_group
from tests.support.selection import slow_unless


class _Done:
    def wait(self) -> None:
        pass


class _Launches(TorchDispatchMode):
    """Counts operations on tensors, without those that only look at one."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not any(result.alias_info for result in func._schema.returns) or "_" in str(
            func
        )
        return func(*args, **(kwargs or {}))


def drawn_pieces(size: int, length: int, seed: int) -> torch.Tensor:
    """bf16 numbers so far apart that each order has a sum of its own; some are no numbers, and in
    the first column all are -0.0."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 13, (size, length), generator=generator)
    pieces = torch.randn(size, length, generator=generator) * 2.0**exponents
    odd = torch.rand(size, length, generator=generator)
    for place, value in enumerate((float("inf"), -float("inf"), float("nan"), -0.0)):
        pieces[(odd > place * 0.01) & (odd < place * 0.01 + 0.004)] = value
    pieces[:, 0] = -0.0
    return pieces.to(torch.bfloat16)


def sum_of_an_exchange(pieces: torch.Tensor, monkeypatch) -> tuple[torch.Tensor, int]:
    """What a rank makes of the rounded gradients of an axis, and in how many launches."""
    size, length = pieces.shape

    def exchange(received, sent, group, async_op):
        received.copy_(pieces.flatten())
        return _Done()

    monkeypatch.setattr(collectives.dist, "all_to_all_single", exchange)
    line = AxisGroup(MeshAxis(size, 1, 0, range(size)), None, tuple(range(size)))
    full = torch.zeros(size * length, device=pieces.device)
    shards = new_shards(full, [line], torch.bfloat16)
    with _Launches() as launches:
        run_steps(collectives.rounded_reduce_scatter_steps(full, [line], shards))
    return shards[-1].cpu(), launches.num


def bits(values: torch.Tensor) -> list[int]:
    """nan has many: here one."""
    return values.nan_to_num(123.0, float("inf"), -float("inf")).view(torch.int32).tolist()


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_rounded_gradients_have_the_bits_of_one_addition_after_another(device, monkeypatch):
    launches = {}
    for size in [*range(1, 65), 2048]:
        pieces = drawn_pieces(size, 24, size)
        expected = pieces[0].float()
        for piece in pieces[1:]:
            expected += piece
        summed, launches[size] = sum_of_an_exchange(pieces.to(device), monkeypatch)
        assert bits(summed) == bits(expected), size
        if size > 16:
            assert bits(summed) != bits(pieces.float().sum(0))
    assert launches[2048] == launches[64] < 16


def reduce_scatter(full: torch.Tensor, axes) -> torch.Tensor:
    shards = new_shards(full, axes)
    run_steps(reduce_scatter_steps(full, axes, shards))
    return shards[-1] if shards else full


def gather_and_reduce_everything(all_sizes: list[tuple[int, int, int]]) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checked = 0
    for sizes in all_sizes:
        groups = shard_groups(sizes)
        topology, numel = groups.topology, 6 * world_size
        values = torch.arange(float(numel))

        own = topology.shard_range(topology.sizes.param, numel)
        full = torch.full((numel,), float("nan"))
        run_steps(all_gather_steps(values[own.start : own.stop].clone(), full, groups.unshard))
        assert torch.equal(full, values), sizes

        scattered = reduce_scatter(values * (rank + 1), groups.grad_reduce)
        own = topology.shard_range(topology.sizes.grad, numel)
        first = topology.rank - topology.rank % topology.sizes.grad
        peers = sum(r + 1 for r in range(first, first + topology.sizes.grad))
        assert torch.equal(scattered, values[own.start : own.stop] * peers), sizes

        summed = reduce_scatter(scattered, groups.grad_sync)
        run_steps(all_reduce_steps(summed, groups.replica_sync))
        own = topology.shard_range(topology.sizes.optim, numel)
        total = world_size * (world_size + 1) // 2
        assert torch.equal(summed, values[own.start : own.stop] * total), sizes
        checked += 1
    return checked


@pytest.mark.parametrize(
    ("world_size", "chains"),
    [
        slow_unless(True, 6, nested_sizes(6) + cut_sizes(6)),
        slow_unless(True, 8, [(2, 4, 8), (4, 2, 8), (1, 1, 8, (2, 4))]),  # three axes
        slow_unless(False, 4, nested_sizes(4) + cut_sizes(4)),
        slow_unless(False, 8, nested_sizes(8) + cut_sizes(8)),
    ],
)
def test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner(
    world_size, chains
):
    checked = run_ranks(gather_and_reduce_everything, world_size, chains)
    assert checked == [len(chains)] * world_size


# ---- bytes


NUMEL, ON_A_NODE = 960, 2


def bytes_by_link(all_sizes: list[tuple]) -> list[tuple[int, int]]:
    """What this rank sent, and of that from its node, for a gather and a reduction of each."""
    network = replace_default_group(NetworkProfile(ranks_per_node=ON_A_NODE))
    found = []
    for sizes in all_sizes:
        groups, full = shard_groups(sizes), torch.zeros(NUMEL)
        before = network.counters.snapshot()
        run_steps(all_gather_steps(full[: NUMEL // 4].clone(), full, groups.unshard))
        reduce_scatter(full, groups.grad_reduce)
        sent = total(network.counters.since(before).values())
        found.append((sent.wire_nbytes, sent.node_nbytes))
    return found


def test_each_link_carries_for_a_cut_axis_what_the_planner_counts_and_less_between_nodes():
    all_sizes = [(4, 4, 4), (4, 4, 4, (2,))]
    found = run_ranks(bytes_by_link, 4, all_sizes)
    cluster = replace(load_cluster("h100"), nodes=2, ranks_per_node=ON_A_NODE)
    of_nodes = []
    for place, sizes in enumerate(all_sizes):
        group = Group(4, ShardSizes(*sizes))
        issued = [
            each for kind in (GATHER, REDUCE) for each in unit_collectives(kind, NUMEL, 4, group)
        ]
        sent = [of_rank[place] for of_rank in found]
        assert {wire for wire, _ in sent} == {sum(each.wire_nbytes for each in issued)}
        leaves = [
            ring_of(each, group, cluster).node_nbytes(each.numel * each.itemsize) for each in issued
        ]
        of_nodes.append(sum(leaves))
        assert sum(node for _, node in sent) == 2 * of_nodes[-1]
    assert of_nodes[1] < of_nodes[0]
