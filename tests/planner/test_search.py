# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the search finds: hierarchy where it pays and what is plain where it does not."""

import time
from dataclasses import replace
from itertools import product

import pytest

from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.cluster import Cluster, load_cluster
from megatron_asynchzp.planner.costs import Plan
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.search import Space, plans, search, shard_divisors, shard_sizes
from megatron_asynchzp.sharding.topology import ShardSizes

LAYER = Layer(Attention(32, 8, 128), Mlp(14336, True))
MODEL = Model(4096, 32000, (LAYER,) * 8, is_tied=False)


def space(cluster: Cluster, batch: int, model: Model = MODEL, seq: int = 4096, **more) -> Space:
    start = Plan(ShardSizes(1, 1, 1), more.pop("parallel", Parallel()), Batch(1, seq))
    return Space(model, cluster, batch, start, **more)


def slow(nodes: int, gb_s: float, **between) -> Cluster:
    cluster = load_cluster("a100").with_ranks(8 * nodes)
    return replace(cluster, between=replace(cluster.between, gb_s=gb_s, cards=1, **between))


def test_hierarchy_wins_between_slow_nodes_with_several_micro_batches():
    outcome = search(space(slow(8, 10.0), 512, micro_batch_sizes=(1,)))
    best = outcome.best
    assert best is not None and not best.scheme
    assert best.plan.sizes.param <= 8 and best.plan.sizes.optim > 8
    zero3 = outcome.baselines["ZeRO-3"]
    assert zero3 is not None and zero3.step_s > 1.2 * best.step_s
    assert "hierarchy pays here" in explain.hierarchy(outcome, best)
    assert "limited by" in explain.limit(best)


def test_plain_sharding_is_returned_where_hierarchy_gains_nothing():
    """A fast network, one micro-batch; and one node."""
    fast = load_cluster("h200").with_ranks(64)
    for cluster, batch in ((fast, 128), (fast.with_ranks(8), 64)):
        outcome = search(space(cluster, batch, seq=8192))
        best = outcome.best
        assert best is not None and best.scheme
        assert "hierarchy does not pay" in explain.hierarchy(outcome, best)


def test_what_is_ranked_fits_and_no_simulated_plan_of_a_scheme_is_faster_than_its_baseline():
    outcome = search(space(slow(4, 10.0), 256))
    assert outcome.ranked and all(one.costing.fits for one in outcome.ranked)
    for name, baseline in outcome.baselines.items():
        steps = [one.step_s for one in outcome.ranked if one.scheme == name]
        assert (baseline is None) == (not steps)
        assert baseline is None or baseline.step_s <= 1.001 * min(steps)


@pytest.mark.parametrize("nodes, gb_s, latency_us", [(2, 5.0, 14.0), (4, 50.0, 50_000.0)])
def test_the_search_finds_what_simulating_everything_finds(nodes, gb_s, latency_us):
    cluster = slow(nodes, gb_s, latency_us=latency_us)
    where = space(cluster, 32 * nodes, replace(MODEL, layers=(LAYER,) * 4), depths=(1,))
    best = search(where).ranked[0]
    fitting = [one for one in map(where.costing, plans(where)) if one.fits]
    assert best.step_s <= 1.002 * min(one.step().step_s for one in fitting)


def test_a_model_that_fits_nowhere_gives_no_plan_but_the_smallest():
    huge = replace(MODEL, hidden=2**17, layers=(LAYER,) * 80)
    outcome = search(space(load_cluster("h100").with_ranks(8), 8, huge))
    assert outcome.best is None and outcome.num_fitting == 0
    assert outcome.smallest is not None and not outcome.smallest.costing.fits


@pytest.mark.slow
def test_256_ranks_are_searched_in_ten_seconds():
    begin = time.process_time()
    deep = replace(MODEL, layers=(LAYER,) * 80)
    outcome = search(space(load_cluster("h100").with_ranks(256), 1024, deep, seq=8192))
    assert time.process_time() - begin < 10.0
    assert outcome.num_plans > 500


def test_a_hundred_thousand_ranks_are_searched_too():
    outcome = search(space(load_cluster("h100").with_ranks(100_000), 100_000, depths=(1,)))
    assert outcome.best is not None


def test_sizes_to_try_nest_and_are_all_there_are_in_small_worlds():
    for ranks, in_node in ((8, 8), (16, 4), (12, 4), (6, 6)):
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        aligned = [d for d in divisors if in_node % d == 0 or d % in_node == 0]
        assert shard_divisors(ranks, in_node) == aligned
        found = set(shard_sizes(ranks, in_node))
        for three in product(aligned, repeat=3):
            param, grad, optim = three
            nests = optim % param == 0 == optim % grad and not max(param, grad) % min(param, grad)
            assert (ShardSizes(*three) in found) == nests
    assert {1, 8, 100_000} <= set(shard_divisors(100_000, 8))


def test_parallel_sizes_are_varied_where_the_user_lets_it():
    cluster = load_cluster("h100").with_ranks(32)
    kept = {plan.parallel for plan in plans(space(cluster, 64, parallel=Parallel(tp=2)))}
    assert {one.tp for one in kept} == {2}
    varied = {plan.parallel for plan in plans(space(cluster, 64, vary=("tp", "pp")))}
    assert {one.tp for one in varied} == {1, 2, 4, 8} and {one.pp for one in varied} >= {1, 2, 4}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_micro_batch_size_keeps_the_global_batch(size):
    for plan in plans(space(load_cluster("h100").with_ranks(16), 64, micro_batch_sizes=(size,))):
        assert plan.batch.size == size and plan.batch.size * plan.batch.num_micro_batches * 16 == 64
