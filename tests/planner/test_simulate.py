# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The simulation of a step: laws for every model and network, and known steps."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import UnitInFlight
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Attention, Batch, Experts, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import OrderUnit, Visit, stage_phases
from megatron_asynchzp.planner.simulate import StageProgram, Step, UnitCost, simulate
from megatron_asynchzp.planner.traffic import Transfer

SIZE, NOTHING = UnitInFlight("u", 128, 128, 128, 1), UnitInFlight("u", 0, 128, 128, 1)
LAYER = Layer(Attention(8, 8, 64), Mlp(2048, False))
SPARSE = Layer(Attention(8, 8, 64), Experts(8, 2, 1024, True))
CLUSTER = Cluster("c", 2, 4, Device(1.0, 80), Link(10.0, 5.0), Link(1.0, 20.0))


def step_of(
    units: int,
    cost: UnitCost,
    micro_batches: int = 2,
    stages: int = 1,
    schedule: ScheduleConfig = ScheduleConfig(),
    host_s: float = 0.0,
    **how,
) -> Step:
    made = []
    for stage in range(stages):
        phases = stage_phases(stage, stages, 1, micro_batches)
        visits = [[Visit(index) for index in range(units)]]
        order = StepOrder(
            [OrderUnit("size", replace(SIZE, layer=str(i))) for i in range(units)],
            visits,
            phases,
            schedule,
        )
        made.append(StageProgram(phases, order, [cost] * units, host_s=host_s))
    return simulate(made, **how)


def without_latencies(cost: UnitCost) -> UnitCost:
    """The same, but that a transfer occupies its link to its end."""
    lanes = {
        lane: [Transfer(one.link, one.busy_s + one.latency_s) for one in getattr(cost, lane)]
        for lane in ("gather", "reduce", "grad_sync", "param_sync")
    }
    return replace(cost, **lanes)


def costing(sizes=(4, 4, 8), micro_batches=2, layers=4, layer=LAYER, cluster=CLUSTER, **plan):
    parallel = plan.pop("parallel", Parallel())
    model = Model(512, 1024, (layer,) * layers, is_tied=False)
    batch = Batch(1, 256, micro_batches)
    return Costing(model, Plan(ShardSizes(*sizes), parallel, batch, **plan), cluster)


# ---- known steps


def test_a_pipeline_without_communication_has_the_bubble_of_1f1b():
    for stages in (1, 2, 4):
        for micro_batches in (1, 3, 8):
            step = step_of(1, UnitCost("u", 1.0, 2.0), micro_batches, stages)
            assert step.step_s == pytest.approx(3 * (micro_batches + stages - 1))
            assert all(one.compute_s == pytest.approx(3 * micro_batches) for one in step.stages)
            bubbles = [one.bubble_s for one in step.stages]
            assert bubbles == pytest.approx([3 * (stages - 1)] * stages)


def test_interleaving_divides_the_bubble_by_the_chunks():
    def bubble(chunks: int) -> float:
        made = []
        for stage in range(4):
            phases = stage_phases(stage, 4, chunks, 8)
            units = [OrderUnit(chunk, NOTHING, is_gathered=False) for chunk in range(chunks)]
            order = StepOrder(
                units, [[Visit(chunk)] for chunk in range(chunks)], phases, ScheduleConfig()
            )
            cost = UnitCost("u", 1.0 / chunks, 2.0 / chunks)
            made.append(StageProgram(phases, order, [cost] * chunks))
        return simulate(made, chunks=chunks).step_s - 3 * 8

    assert bubble(1) == pytest.approx(9) and bubble(3) == pytest.approx(3)


def test_what_is_hidden_costs_nothing_and_the_first_gather_is_never_hidden():
    cost = UnitCost(
        "u", 1.0, 2.0, gather=[Transfer("inside", 0.5)], reduce=[Transfer("inside", 0.25)]
    )
    step = step_of(8, cost, micro_batches=1)
    assert step.step_s == pytest.approx(8 * 3 + 0.5 + 0.25)  # the first gather, the last reduction
    slow = replace(cost, gather=[Transfer("inside", 3.0)])
    assert step_of(8, slow, micro_batches=1).step_s > 8 * 3 + 8


def test_a_lane_moves_what_it_has_while_another_waits_for_a_latency():
    late = [Transfer("between", 1.0, 1.0)]
    waiting = UnitCost("u", 1.0, 1.0, gather=late, reduce=late)
    slow, fast = step_of(16, without_latencies(waiting)), step_of(16, waiting)
    # Two lanes that begin together share the link, and wait for their latencies together.
    assert (slow.step_s, fast.step_s) == pytest.approx((184.0, 155.0))
    links = [step.stages[0].links_s["between"] for step in (slow, fast)]
    assert links[0] == pytest.approx(2 * links[1])


def test_operations_of_several_lanes_share_a_link_evenly():
    cost = UnitCost("u", 1.0, 1.0, [Transfer("inside", 0.5)], [Transfer("inside", 0.5)])
    # Memory for one unit: each gather begins with the reduction of the unit before.
    least = ScheduleConfig("threaded", 1, SIZE.params + SIZE.grads)
    step = step_of(8, cost, 1, schedule=least, with_spans=True)
    waits = [end - start for lane, _, start, end in step.spans[0] if lane == "wait"]
    assert waits == pytest.approx(8 * [0.5] + 7 * [1.0] + [0.5])
    assert step.worst.links_s["inside"] == pytest.approx(16 * 0.5 + 8 * 0.5 - 0.5)


def test_parameters_are_rebuilt_while_the_host_prepares_the_step():
    cost = UnitCost("u", 1.0, 2.0, param_sync=[Transfer("between", 0.5)])
    for host_s, step_s in ((0.0, 12.5), (0.25, 12.5), (0.75, 12.75)):
        step = step_of(4, cost, 1, host_s=host_s)
        assert step.step_s == pytest.approx(step_s)


def test_the_inline_schedule_is_the_sum_of_everything():
    cost = UnitCost(
        "u",
        1.0,
        2.0,
        [Transfer("inside", 0.5)],
        [Transfer("inside", 0.25)],
        [Transfer("between", 2.0)],
    )
    step = step_of(4, cost, 1, schedule=ScheduleConfig("inline"))
    gathers = 2 * 4 - 1  # the unit at the turn is kept
    assert step.step_s == pytest.approx(4 * 3 + gathers * 0.5 + 4 * 0.25 + 4 * 2.0)
    rebuilt = replace(cost, param_sync=[Transfer("between", 1.0)])
    later = step_of(4, rebuilt, 1, schedule=ScheduleConfig("inline"), host_s=0.75)
    assert later.step_s == pytest.approx(step.step_s + 4 * 1.0 + 0.75)


# ---- laws

transfers = st.builds(
    Transfer,
    st.sampled_from(["inside", "between"]),
    st.floats(0, 2),
    st.floats(0, 1) | st.just(0.0),
)
costs = st.builds(
    UnitCost, st.just("u"), *[st.floats(0.01, 2.0)] * 2, *[st.lists(transfers, max_size=2)] * 4
)


@settings(max_examples=60)
@given(costs, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_a_step_is_between_its_busiest_part_and_the_sum_of_all(cost, units, batches, stages, depth):
    step = step_of(units, cost, batches, stages, ScheduleConfig(prefetch_depth=depth))
    for one in step.stages:
        spent = one.compute_s + one.exposed_s + one.bubble_s
        assert spent == pytest.approx(step.step_s)
        busiest = max([one.compute_s, *one.links_s.values()])
        assert step.step_s >= busiest * (1 - 1e-9)
    slow = step_of(
        units, without_latencies(cost), batches, stages, ScheduleConfig(prefetch_depth=depth)
    )
    together = sum(one.compute_s + sum(one.links_s.values()) for one in slow.stages)
    assert step.step_s <= together * (1 + 1e-9)


@settings(max_examples=40)
@given(costs, st.integers(2, 6), st.integers(1, 3))
def test_the_inline_schedule_is_never_faster(cost, units, batches):
    inline = step_of(units, cost, batches, schedule=ScheduleConfig("inline"))
    assert step_of(units, cost, batches).step_s <= inline.step_s * (1 + 1e-9)


def test_a_timeline_has_no_two_computations_at_once_and_covers_the_step():
    (spans,) = costing().simulate(2, with_spans=True).spans
    computing = sorted((s.start, s.end) for s in spans if s.lane == "compute" and s.end > s.start)
    assert all(before[1] <= after[0] + 1e-12 for before, after in zip(computing, computing[1:]))
    waits = sum(s.end - s.start for s in spans if s.lane == "wait")
    assert waits == pytest.approx(costing().simulate(2).worst.exposed_s)
    assert {s.lane for s in spans} >= {"gather", "reduce", "grad-sync", "param-sync", "capture"}


# ---- whole plans


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("layer", [LAYER, SPARSE])
def test_many_micro_batches_take_as_long_as_if_all_were_simulated(stages, layer):
    one = costing((2, 2, 4), 24, layer=layer, parallel=Parallel(pp=stages))
    whole, folded = one.simulate(24), one.step()
    assert folded.step_s == pytest.approx(whole.step_s, rel=5e-3)
    assert folded.worst.exposed_s == pytest.approx(whole.worst.exposed_s, rel=0.05, abs=1e-3)


def test_a_thousand_units_and_64_micro_batches_are_simulated_in_a_second():
    """Of a core's own; three here, where tests share it with others."""
    one = costing(micro_batches=64, layers=1000)
    begin = time.process_time()
    step = one.step()
    assert time.process_time() - begin < 3.0
    assert step.step_s > 0


def test_more_ranks_of_equal_work_are_never_faster_and_stragglers_make_them_slower():
    steps = []
    for nodes in (1, 8, 64, 12_500):
        cluster = replace(CLUSTER, nodes=nodes, ranks_per_node=8)
        steps.append(costing((8, 8, 8), 2, cluster=cluster).step().step_s)
    assert steps == sorted(steps)
    uneven = replace(CLUSTER, imbalance=0.02)
    assert costing(cluster=uneven).step().step_s > costing().step().step_s


@pytest.mark.parametrize("layer", [LAYER, SPARSE], ids=["dense", "experts"])
def test_an_optimizer_takes_what_it_owns_and_the_gradients_that_it_zeroes(layer):
    """As many bytes as the shards of the optimizer and of the gradients have, for all sizes."""
    model = Model(512, 1024, (layer,) * 2, is_tied=False)
    for param, grad, optim in ((1, 1, 1), (1, 1, 8), (2, 2, 8), (1, 4, 8), (8, 2, 8), (8, 8, 8)):
        sizes = ShardSizes(param, grad, optim)
        parallel = Parallel(ep=2 if layer is SPARSE else 1)
        costing = Costing(model, Plan(sizes, parallel, Batch(1, 128)), CLUSTER)
        held = costing.stage_memory(0).at_rest
        # Main parameter and moments are read and written, the gradient is read twice, and the
        # model's copy written: 34 bytes where a main parameter has 4.
        nbytes = 34 / 4 * held["main_param"] + held["main_grad"]
        seconds = nbytes / (1e9 * CLUSTER.device.memory_gb_s)
        assert costing.optimizer_s(0) == pytest.approx(seconds)
