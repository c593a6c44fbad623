# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Other systems with their own schedules: what they send when, and when it is said that nothing is
gained over them."""

from dataclasses import replace

import pytest

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.cluster import Cluster
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.contenders import (
    CONTENDERS,
    DISTRIBUTED_OPTIMIZER,
    FSDP2_HSDP,
    GTP,
    MEGATRON_HFSDP,
    MEGATRON_HSDP,
    PLAIN_DATA_PARALLELISM,
    Contender,
)
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Batch, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import GRAD_SYNC, PARAM_SYNC, REDUCE
from megatron_asynchzp.planner.search import search
from tests.planner.test_search import MODEL, slow, space


def costing(of: Contender, cluster: Cluster, count: int) -> Costing:
    ranks = cluster.num_ranks
    numbers = of.numbers(ranks, cluster.ranks_per_node)
    like = Plan(ShardSizes(*numbers), Parallel(), Batch(1, 4096, count))
    return Costing(MODEL, of.plan(like), cluster)


@pytest.mark.parametrize("count", [1, 4])
def test_over_nodes_it_is_sent_in_each_backward_or_once(count):
    cluster = slow(4, 10.0)
    sent = {}
    for of in CONTENDERS:
        one = costing(of, cluster, count)
        sent[of.name] = one.node_nbytes
    hsdp, once = sent["FSDP2's HSDP"], sent["Megatron-FSDP's HSDP"]
    assert hsdp == pytest.approx(count * once)
    assert sent["Megatron-FSDP's HFSDP"] == sent["GTP"]
    # Of FSDP2 all goes over nodes: two gathers in bf16 and a reduction in fp32, each time, but
    # those of units that the next pass finds gathered.
    once = sent["distributed optimizer"]
    assert 1.15 * count * once < sent["FSDP2"] < 1.34 * count * once


def test_a_sum_over_replicas_in_each_backward_costs_what_it_sends():
    cluster = slow(4, 10.0)
    steps = {
        of: [costing(of, cluster, count).step().step_s for count in (1, 4)]
        for of in (FSDP2_HSDP, MEGATRON_HSDP)
    }
    assert steps[FSDP2_HSDP][1] > 1.2 * steps[MEGATRON_HSDP][1]


def test_plain_data_parallelism_and_the_distributed_optimizer_send_what_they_are_known_to():
    """Of n bytes in bf16 and 2 n in fp32 over R ranks: an all-reduce of the gradients, or
    reduce-scatter and all-gather, (R - 1) / R of each turn."""
    cluster = slow(4, 10.0).with_ranks(4 * 8)
    ranks, units = cluster.num_ranks, MODEL.units
    for of, fp32, bf16 in ((PLAIN_DATA_PARALLELISM, 2, 0), (DISTRIBUTED_OPTIMIZER, 1, 1)):
        assert of.numbers(ranks, 8) == ((1, 1, 1) if not bf16 else (1, 1, ranks))
        one = costing(of, cluster, 1)
        sent = sum(
            each.wire_nbytes
            for unit in units
            for kind in (REDUCE, GRAD_SYNC, PARAM_SYNC)
            for each in one.collectives(kind, unit)
        )
        whole = sum(map(one.padded, units)) * (4 * fp32 + 2 * bf16)
        assert sent == pytest.approx(whole * (ranks - 1) / ranks, rel=1e-6)


def test_what_is_summed_in_each_backward_is_sent_with_its_reduction_over_two_ranks_too():
    cluster = slow(4, 10.0)
    plan = Plan(ShardSizes(1, 2, 8), Parallel(), Batch(1, 4096, 2))
    once, each = (Costing(MODEL, replace(plan, sums_each=on), cluster) for on in (False, True))
    for unit in MODEL.units:
        later = once.collectives(REDUCE, unit) + once.collectives(GRAD_SYNC, unit)
        assert each.collectives(REDUCE, unit) == later and each.collectives(GRAD_SYNC, unit) == []


def test_who_loses_nothing_is_told_to_stay_and_who_gains_is_not():
    outcome = search(space(slow(8, 10.0), 512, micro_batch_sizes=(1,)))
    best = outcome.best
    assert best is not None
    text = explain.stay(outcome, best)
    for of, found in outcome.contenders.items():
        assert found is not None
        gains = found.step_s / best.step_s - 1
        same, _, unsure = text.partition("; over ")
        assert (f"{of.name} (" in same) == (gains <= 0.005), (of.name, gains)
        assert (f"{of.name} (" in unsure) == (0.005 < gains <= 0.056), (of.name, gains)
    assert "GTP" in same and "FSDP2" not in text and "distributed optimizer" in unsure
    lines = explain.comparisons(outcome, best)
    assert len(lines) == len(CONTENDERS)


def test_on_one_node_no_system_is_another_one_there():
    outcome = search(space(load_cluster("h200").with_ranks(8), 64, seq=8192))
    best = outcome.best
    assert best is not None and not any(one.needs_nodes for one in outcome.contenders)
    assert explain.stay(outcome, best).startswith("stay where you are with ")


def test_sizes_that_two_systems_share_take_as_long_and_neither_gains_over_the_other():
    """Megatron-FSDP measured 0.06% for another order of what it sends over nodes, on 256 GPUs
    (NVIDIA/Megatron-LM#6973)."""
    fast = load_cluster("h200").with_ranks(256)
    theirs, gtp = (costing(of, fast, 8).step().step_s for of in (MEGATRON_HFSDP, GTP))
    ours = Costing(MODEL, replace(costing(GTP, fast, 8).plan, schedule=ScheduleConfig()), fast)
    assert theirs == gtp == pytest.approx(ours.step().step_s, rel=0.005)
