# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What adapters cost in a frozen model, on paper."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import (
    ADAPTED,
    Adapters,
    Attention,
    Batch,
    Layer,
    Mlp,
    Model,
    Parallel,
    stage_units,
)
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import COMPUTE, GATHER

_LAYER = Layer(Attention(8, 4, 16), Mlp(256, True))
_TRAINED = Model(128, 512, (_LAYER,) * 4, is_tied=False)
_RANK = 8
_FROZEN = replace(_TRAINED, adapters=Adapters(_RANK, frozenset(ADAPTED)))
_BATCH = Batch(1, 64, 4)
_CLUSTER = Cluster("any", 8, 4, Device(1.0, 1.0), Link(1.0), Link(1.0))
# Inputs and outputs of the projections to queries, keys and values, of heads, and of the MLP.
_ENDS = (128 + 256) + (128 + 128) + (128 + 512) + (256 + 128)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_is_as_large_as_before_and_beside_it_are_rank_times_the_ends_of_its_projections(tp):
    units = stage_units(_FROZEN, Parallel(tp=tp), _BATCH, 0)
    before = stage_units(_TRAINED, Parallel(tp=tp), _BATCH, 0)
    assert [u.shapes for u in units if not u.is_trained] == [u.shapes for u in before]
    adapters = [unit for unit in units if unit.is_trained]
    assert [unit.layer for unit in adapters] == [f"layer {index}" for index in range(4)]
    assert {unit.numel for unit in adapters} == {_RANK * _ENDS // tp}


def test_what_is_frozen_has_parameters_and_no_other_state():
    sizes = ShardSizes(2, 4, 8)
    costing = Costing(_FROZEN, Plan(sizes, Parallel(), _BATCH), _CLUSTER)
    whole = sum(unit.numel for unit in costing.units[0])
    trained = 4 * _RANK * _ENDS
    assert costing.states_by_formula(0) == {
        "model_param": 2 * whole / 2,
        "main_grad": 4 * trained / 4,
        "main_param": 4 * trained / 8,
        "optimizer_moments": 8 * trained / 8,
    }


def test_operations_other_than_gathers_are_those_of_adapters_alone():
    costing = Costing(_FROZEN, Plan(ShardSizes(2, 2, 8), Parallel(), _BATCH), _CLUSTER)
    actions = costing.stages(_BATCH.num_micro_batches)[0].order.actions
    seen = Counter((one.kind, costing.units[0][one.unit].kind) for one in actions)
    gathered = {unit for kind, unit in seen if kind == GATHER}
    assert gathered == {"embedding", "layer", "adapters", "root", "output"}
    others = {kind for kind, unit in seen if unit != "adapters"} - {COMPUTE, GATHER}
    assert others == set() and len({kind for kind, unit in seen if unit == "adapters"}) == 5


def test_backward_through_frozen_weights_takes_the_gradients_of_inputs_alone():
    costing = Costing(_FROZEN, Plan(ShardSizes(1, 1, 8), Parallel(), _BATCH), _CLUSTER)
    for unit in costing.units[0]:
        factor = costing.compute.backward_flops(unit) / unit.flops if unit.flops else None
        if unit.kind in ("adapters", "output"):
            assert factor == (2 if unit.kind == "adapters" else 1)
        elif unit.kind == "layer":  # the scores of attention have two, as before
            assert factor is not None and 1 < factor < 1.1
