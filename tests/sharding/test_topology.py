# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ranks, over every nesting of shard sizes of small worlds."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.sharding.topology import Range, ShardSizes, ShardTopology, spans_nodes
from megatron_asynchzp.errors import ConfigurationError
from tests.support.engine import cut_sizes

WORLDS = [1, 2, 3, 4, 6, 8, 12, 16]


def legal_sizes(world_size: int) -> list[ShardSizes]:
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    legal = []
    for param, grad, optim in product(divisors, repeat=3):
        nests = optim % param == 0 and optim % grad == 0
        if nests and (param % grad == 0 or grad % param == 0):
            legal.append(ShardSizes(param, grad, optim))
    return legal


def topologies():
    for world_size in WORLDS:
        cut = [ShardSizes(*sizes) for sizes in cut_sizes(world_size)]
        for sizes in legal_sizes(world_size) + cut:
            yield [ShardTopology(world_size, rank, sizes) for rank in range(world_size)]


def test_exactly_the_nested_sizes_are_accepted():
    for world_size in WORLDS:
        accepted = []
        for sizes in product(range(world_size + 2), repeat=3):
            try:
                ShardSizes(*sizes).check(world_size)
            except ConfigurationError:
                continue
            accepted.append(ShardSizes(*sizes))
        assert sorted(map(repr, accepted)) == sorted(map(repr, legal_sizes(world_size)))


@pytest.mark.parametrize(
    ("sizes", "world_size", "fragment"),
    [
        ((3, 1, 4), 4, "not a multiple of the param shard size 3"),
        ((1, 3, 4), 4, "not a multiple of the grad shard size 3"),
        ((2, 3, 6), 6, "do not nest"),
        ((2, 2, 6), 8, "does not divide the 8 ranks"),
        ((1, 1, 16), 8, "exceeds the 8 ranks"),
        ((0, 1, 4), 4, "not a positive number"),
        ((1, 1, 8, (3,)), 8, "1, 3, 8 ranks, and 3 does not divide 8"),
        ((1, 6, 12, (4,)), 12, "1, 4, 6, 12 ranks, and 4 does not divide 6"),
        ((1, 1, 4, (8,)), 8, "cannot be cut at 8 ranks, as the optim shard size is 4"),
        ((1, 1, 4, (0,)), 4, "cannot be cut at 0 ranks"),
    ],
)
def test_a_refused_size_is_named_with_the_reason(sizes, world_size, fragment):
    with pytest.raises(ConfigurationError, match=fragment):
        ShardSizes(*sizes).check(world_size)


def test_the_axes_multiply_to_the_world_and_pair_every_rank_with_its_peers():
    for world in topologies():
        for topology in world:
            product_of_axes = 1
            for axis in topology.axes:
                product_of_axes *= axis.size
                assert axis.members[axis.coordinate] == topology.rank
                for member in axis.members:
                    assert axis.members in [a.members for a in world[member].axes]
            assert product_of_axes == topology.world_size


def test_the_shards_of_one_copy_tile_the_buffer_once():
    for world in topologies():
        topology = world[0]
        numel = 5 * topology.sizes.optim
        for size in (topology.sizes.param, topology.sizes.grad, topology.sizes.optim):
            for first in range(0, topology.world_size, size):
                ranges = sorted(t.shard_range(size, numel) for t in world[first : first + size])
                assert ranges[0].start == 0 and ranges[-1].stop == numel
                assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:]))


def test_a_ranks_optimizer_shard_lies_within_its_gradient_and_its_parameter_shard():
    for world in topologies():
        for topology in world:
            numel = 3 * topology.sizes.optim
            optim = topology.shard_range(topology.sizes.optim, numel)
            for size in (topology.sizes.param, topology.sizes.grad):
                assert optim.intersect(topology.shard_range(size, numel)) == optim


@pytest.mark.parametrize(
    ("sizes", "in_node", "axes"),
    [
        ((8, 8, 16384), 8, [8, 64, 32]),
        ((8, 64, 16384), 8, [8, 8, 16, 16]),
        ((16384, 16384, 16384), 8, [8, 64, 32]),
        ((1, 1, 98304), 8, [8, 32, 24, 16]),
        ((8, 8, 8 * 127), 8, [8, 127]),  # a prime cannot be cut
        ((8, 8, 512), 8, [8, 64]),
        ((16, 16, 8192), 8, [16, 32, 16]),
        ((1, 1, 1000), 16, [40, 25]),  # nodes that do not divide it
        ((4, 4, 500), 8, [4, 25, 5]),
    ],
)
def test_long_axes_are_cut_evenly_and_a_node_stays_together(sizes, in_node, axes):
    whole = ShardSizes(*sizes)
    cut = whole.with_short_axes(in_node)
    assert (cut.param, cut.grad, cut.optim) == sizes
    assert [axis.size for axis in ShardTopology(sizes[2], 5, cut).axes] == axes
    assert cut.with_short_axes(in_node) == cut
    # The copies of an optimizer shard are summed along a tree, whose latency grows slowly.
    copies = ShardTopology(sizes[2] * 128, 5, cut)
    assert [axis.size for axis in copies.axes] == [*axes, 128]
    assert ShardTopology(sizes[2] // 2, 0, cut.restricted_to(sizes[2] // 2))


def test_the_axes_of_each_operation_lead_from_one_size_to_the_other():
    for world in topologies():
        topology, sizes = world[0], world[0].sizes
        for axes, ratio in (
            (topology.param_axes, sizes.param),
            (topology.grad_axes, sizes.grad),
            (topology.grad_sync_axes, sizes.optim // sizes.grad),
            (topology.param_sync_axes, sizes.optim // sizes.param),
            (topology.replica_axes, topology.world_size // sizes.optim),
        ):
            found = 1
            for axis in axes:
                found *= axis.size
            assert found == ratio


def test_ranks_with_the_same_optimizer_shard_are_the_replicas_and_one_of_them_counts():
    for world in topologies():
        numel = world[0].sizes.optim
        by_range: dict[Range, list[ShardTopology]] = {}
        for topology in world:
            by_range.setdefault(topology.shard_range(topology.sizes.optim, numel), []).append(
                topology
            )
        for replicas in by_range.values():
            assert sorted(t.replica_index for t in replicas) == list(range(len(replicas)))


@given(st.integers(1, 48), st.data())
def test_sizes_restricted_to_a_smaller_group_still_nest(world_size, data):
    sizes = data.draw(st.sampled_from(legal_sizes(world_size)))
    smaller = data.draw(st.integers(1, 48))
    sizes.restricted_to(smaller).check(smaller)


def test_inner_axes_stay_on_the_node_and_outer_ones_leave_it():
    topology = ShardTopology(8, 5, ShardSizes(2, 4, 8))
    inside = [spans_nodes(axis.members, ranks_per_node=4) for axis in topology.axes]
    assert inside == [False, False, True]
