# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A plan in bytes, by hand: groups of experts, states on the host, what gloo copies."""

from dataclasses import replace

import pytest

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Batch, Experts, Parallel
from megatron_asynchzp.planner.plan import Plan
from tests.planner.test_search import LAYER, MODEL

CLUSTER = load_cluster("h100").with_ranks(64)


@pytest.mark.parametrize(
    ("parallel", "dense", "experts"),
    [
        (Parallel(tp=2, ep=4), 32, 8),
        (Parallel(tp=4, ep=8, expert_tp=1), 16, 8),
        (Parallel(tp=2, pp=4, ep=4, expert_tp=1), 8, 4),
        (Parallel(tp=1, pp=2, ep=16), 32, 2),
    ],
)
def test_the_ranks_of_a_stage_share_dense_weights_by_tp_and_experts_by_their_own_tp_and_ep(
    parallel, dense, experts
):
    model = replace(MODEL, layers=(replace(LAYER, mlp=Experts(64, 8, 2048, True)),) * 8)
    groups = Costing(model, Plan(ShardSizes(1, 2, 2), parallel, Batch(1, 4096)), CLUSTER).groups
    assert (groups["dense"].ranks, groups["expert"].ranks) == (dense, experts)


@pytest.mark.parametrize("offload", [0.0, 0.3, 0.5, 1.0])
def test_states_of_the_first_units_are_on_the_host_and_those_of_the_others_are_not(offload):
    plan = Plan(ShardSizes(1, 1, 64), Parallel(), Batch(1, 4096), offload=offload)
    costing = Costing(MODEL, plan, CLUSTER)
    trained = [unit for unit in costing.units[0] if unit.numel]
    left, whole = list(trained), sum(unit.numel for unit in trained)
    while sum(unit.numel for unit in left) > (1 - offload) * whole + 1:
        left.pop(0)
    main = costing.states_by_formula(0)["main_param"]
    assert main == pytest.approx(4 * sum(unit.numel for unit in left) / 64)


@pytest.mark.parametrize("grad_size", [1, 2, 4])
def test_on_a_cpu_gloo_copies_a_piece_of_gradients_where_two_ranks_or_more_reduce_them(grad_size):
    sizes, batch = ShardSizes(1, grad_size, 4), Batch(1, 4096)
    plan = Plan(sizes, Parallel(), batch, is_on_cpu=True)
    memory = Costing(MODEL, plan, CLUSTER).stage_memory(0)
    assert (memory.copied_grads > 0) == (grad_size > 1)
