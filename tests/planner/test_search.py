# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the search finds: hierarchy where it pays and what is plain where it does not."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest

from megatron_asynchzp.engine.schedule import EARLY_UPDATES, ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner import search as search_module
from megatron_asynchzp.planner import space as space_module
from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.cluster import GIB, Cluster
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import (
    ADAPTED,
    Adapters,
    Attention,
    Batch,
    Experts,
    Layer,
    Mlp,
    Model,
    Parallel,
)
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import GRAD_SYNC, PARAM_SYNC
from megatron_asynchzp.planner.search import Candidate, Outcome, search
from megatron_asynchzp.planner.simulate import StageTimes, Step
from megatron_asynchzp.planner.space import Space, batches, plans, shard_divisors, shard_sizes

LAYER = Layer(Attention(32, 8, 128), Mlp(14336, True))
MODEL = Model(4096, 32000, (LAYER,) * 8, is_tied=False)
BATCH = Batch(1, 4096)
LLAMA_70B = Model(
    8192, 128256, (Layer(Attention(64, 8, 128), Mlp(28672, True)),) * 80, is_tied=False
)


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
    line = "hierarchy may pay here, within the planner's error of 5.6%: 4.2% faster than"
    assert line in explain.hierarchy(outcome, best)
    assert "limited by" in explain.limit(best)


@pytest.mark.parametrize(
    "layer, parallel, what",
    [
        (replace(LAYER, mlp=Experts(64, 8, 2048, True)), Parallel(ep=16, pp=4),
         "the experts' all-to-all"),
        (LAYER, Parallel(tp=16, sequence_parallel=True), "tensor-parallel collectives"),
        (replace(LAYER, mixer=Attention(32, 32, 128)), Parallel(cp=32),
         "context-parallel keys and values"),
        (LAYER, Parallel(), "computing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full")])
def test_what_model_parallelism_sends_is_named_and_keeps_links_busy(
    layer, parallel, what, recompute
):
    """Shares of a step are all of it, and the links are those that carry it."""
    cluster = slow(8, 5.0) if what != "computing" else load_cluster("h200").with_ranks(8)
    batch = Batch(1, 4096 * parallel.cp, 8)
    plan = Plan(ShardSizes(1, 1, 1), parallel, batch, recompute=recompute)
    costing = Costing(replace(MODEL, layers=(layer,) * 8), plan, cluster)
    step = costing.step()
    text = explain.limit(Candidate(costing, step))
    assert text.startswith(f"limited by {what}: ")
    times = text.split(";")[0]
    shares = [int(share) for share in re.findall(r"(\d+)%", times)]
    assert sum(shares) == pytest.approx(100, abs=2), text
    between = int(re.findall(r"(\d+)%", text)[-1])
    assert (between > 30) == (what != "computing"), text
    # The simulated times are what they were: computation with what is sent within.
    sent = costing.compute.sent_in(costing.units[0])
    whole = sum(map(sum, map(costing.compute.of_unit, costing.units[0])))
    assert 0 <= sum(waited for waited, _ in sent.values()) < whole


@pytest.mark.parametrize(
    "tp, cp, link",
    [(1, 8, "inside"), (1, 16, "between"), (4, 2, "inside"), (4, 4, "between"), (8, 2, "between")],
)
def test_keys_and_values_leave_a_node_of_8_where_its_ranks_are_fewer_than_the_group(tp, cp, link):
    parallel = Parallel(tp=tp, cp=cp, sequence_parallel=tp > 1)
    plan = Plan(ShardSizes(1, 1, 1), parallel, Batch(1, 4096 * cp, 8))
    costing = Costing(MODEL, plan, slow(8, 5.0))
    sent = costing.compute.sent_in(costing.units[0])
    links = {where: busy for (what, where), (_, busy) in sent.items() if "context" in what}
    assert links.keys() == {link}
    # By hand: each of a node's 8 ranks sends (cp - 1) / cp of what a tensor-parallel rank has of
    # the keys and values of 8 heads, forward and backward, through 1 card or its own NVLink.
    nbytes = 4096 * cp * 2 * 8 * 128 * 2 / tp * (cp - 1) / cp * len(MODEL.layers) * 2
    cluster = slow(8, 5.0)
    one = cluster.between if link == "between" else cluster.inside
    share = min(8, max(1, tp)) if link == "between" else 1
    message = 4096 * 2 * 8 * 128 * 2 / tp
    assert links[link] == pytest.approx(share * nbytes / one.reached(message), rel=1e-3)


@pytest.mark.parametrize("own", [1, 3, 512])
def test_micro_batches_are_tried_up_to_128_sequences_and_the_one_of_the_flags(own):
    where = space(slow(1, 10.0), 3 * 8 * 1024)
    where = replace(where, start=replace(where.start, batch=Batch(own, 4096)))
    sizes = [batch.size for batch in batches(where, Parallel())]
    assert sizes == sorted({1, 2, 4, 8, 16, 32, 64, 128, own})


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
    simulated = [one.costing.plan for one in outcome.ranked]
    assert all(simulated.count(plan) == 1 for plan in simulated)
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


def test_no_step_of_a_pipeline_is_shorter_than_the_bound_of_a_plan_that_does_not_fit():
    cluster = slow(2, 5.0)
    cluster = replace(cluster, device=replace(cluster.device, memory_gib=20))
    for virtual in (1, 2, 4):
        parallel = Parallel(pp=2, virtual=virtual)
        where = space(cluster, 64, parallel=parallel, micro_batch_sizes=(1,), depths=(1,))
        found = search(replace(where, recomputes=(Recompute(),)))
        assert found.out_of_memory is not None, virtual
        faster, bound_s = found.out_of_memory
        assert bound_s < found.ranked[0].step_s
        assert 0.9 * faster.costing.step().step_s < bound_s <= faster.costing.step().step_s


def test_a_model_that_fits_nowhere_gives_no_plan_but_the_smallest():
    huge = replace(MODEL, hidden=2**17, layers=(LAYER,) * 80)
    outcome = search(space(load_cluster("h100").with_ranks(8), 8, huge))
    assert outcome.best is None and outcome.num_fitting == 0
    assert outcome.smallest is not None and not outcome.smallest.costing.fits


def test_a_hundred_thousand_ranks_are_searched_too():
    outcome = search(space(load_cluster("h100").with_ranks(100_000), 100_000, depths=(1,)))
    assert outcome.best is not None


@pytest.mark.parametrize("ranks", [16_384, 98_304])
def test_with_the_default_sizes_latency_is_a_small_part_of_a_step_however_many_ranks(ranks):
    """Of Llama 70B on H100: 4.8 of 7.9 s, and 28.6 of 29.9 s, along one axis."""
    model = LLAMA_70B
    sizes = ShardSizes(8, 8, ranks).with_short_axes(8)
    plan = Plan(sizes, Parallel(), Batch(1, 8192, 1))
    costing = Costing(model, plan, load_cluster("h100").with_ranks(ranks))
    each = costing.communication(0)
    latency_s = sum(
        one.latency_s for unit in each for k in (GRAD_SYNC, PARAM_SYNC) for one in unit[k]
    )
    assert latency_s < 0.05 * costing.step().step_s


@pytest.mark.parametrize("outer", [8, 64, 16_384])
def test_neither_larger_gradient_slots_nor_shared_collectives_would_shorten_a_step(outer):
    """Of Llama 70B on 16,384 H100: what docs/scale.md says is not worth building."""
    model = LLAMA_70B
    cluster = load_cluster("h100").with_ranks(16_384)
    at_once = replace(cluster, between=replace(cluster.between, latency_us=0, start_us=0))
    plan = Plan(
        ShardSizes(min(outer, 8) if outer < 16_384 else outer, outer, 16_384).with_short_axes(8),
        Parallel(),
        Batch(1, 8192, 1),
    )
    large = replace(plan, schedule=replace(plan.schedule, grad_slot_nbytes=1 << 33))
    costing = Costing(model, plan, cluster)
    step_s = costing.step().step_s
    for other in (Costing(model, large, cluster), Costing(model, plan, at_once)):
        assert other.step().step_s > 0.997 * step_s
    small = [unit for unit in costing.units[0] if unit.numel < 1e8]
    shared_s = sum(
        t.latency_s for u in small for k in (GRAD_SYNC, PARAM_SYNC) for t in costing.work(k, u)
    )
    assert [unit.name for unit in small] == ["final norm"] and shared_s < 0.0007


def test_sizes_that_the_first_pass_leaves_out_are_tried_around_the_best(monkeypatch):
    fast = space(slow(8, 10.0), 512, micro_batch_sizes=(1,), depths=(1,))
    every = search(fast)
    monkeypatch.setattr(space_module, "_MOST_SIZES", 3)
    costing, looked_at = Space.costing, list[Plan]()
    monkeypatch.setattr(
        Space, "costing", lambda self, plan: looked_at.append(plan) or costing(self, plan)
    )
    few = search(fast)
    assert len(looked_at) == len(set(looked_at)) == few.num_plans < every.num_plans
    tried = {size for one in few.ranked for size in (one.plan.sizes.grad, one.plan.sizes.optim)}
    assert tried > {1, 8, 64}
    assert few.ranked[0].step_s <= 1.01 * every.ranked[0].step_s


def test_no_plan_is_estimated_at_or_below_its_lower_bound():
    where = space(slow(4, 5.0), 96, depths=(1,), micro_batch_sizes=(1,), vary=("tp", "pp"))
    for plan in random.Random(3).sample(list(plans(where)), 20):
        costing = where.costing(plan)
        if costing.has_room:
            bound_s, estimate_s = search_module._bounds_of(costing)
            assert 0 < bound_s < estimate_s


def random_costing(chance: random.Random) -> Costing:
    """A plan of a small model: unequal stages, experts, adapters, budgets, any depth."""
    pick = chance.choice
    nodes, per_node, pp = pick([1, 2, 4]), pick([1, 2, 4]), pick([1, 1, 2, 4])
    cluster = replace(slow(1, pick([1.0, 50.0])), nodes=nodes * pp, ranks_per_node=per_node)
    device = replace(cluster.device, tflops=pick([1.0, 50.0, 5000.0]))
    cluster = replace(cluster, device=device, runs_ahead=pick([True, False]))
    virtual, hidden, ranks = pick([1, 2]) if pp > 1 else 1, pick([256, 4096]), nodes * per_node
    chunks = pp * virtual
    layers = tuple(1 + chance.randrange(4) for _ in range(chunks))
    mlp = pick([Mlp(4 * hidden, True), Experts(4, 2, hidden, True)])
    is_dense = isinstance(mlp, Mlp)
    model = Model(
        hidden, 1000, (Layer(Attention(8, 8, hidden // 8), mlp),) * sum(layers),
        is_tied=pick([True, False]),
        adapters=pick([None, Adapters(8, frozenset(ADAPTED[:2]))]) if is_dense else None,
    )  # fmt: skip
    schedule = ScheduleConfig(
        pick(["main-thread", "inline"]), chance.randrange(4), early_update=pick(EARLY_UPDATES),
        keep_params_nbytes=pick([0, 0, 1 << 22]), keep_grads_nbytes=pick([0, 0, 1 << 24]),
    )  # fmt: skip
    parallel = Parallel(
        pp=pp, virtual=virtual, ep=1 if is_dense or ranks % 2 else 2, stage_layers=layers
    )
    sizes = pick(list(shard_sizes(ranks, min(ranks, per_node))))
    batch = Batch(1, pick([128, 2048]), chance.randint(1, 5) * chunks // virtual)
    recompute = Recompute(pick(["none", "full"]))
    return Costing(model, Plan(sizes, parallel, batch, schedule, recompute), cluster)


def test_no_simulated_step_is_shorter_than_the_lower_bound_of_its_plan():
    """Frozen units send no gradients, units stay gathered between passes, stages differ."""
    shares = []
    for seed in range(150):
        costing = random_costing(random.Random(seed))
        if costing.has_room:
            shares.append(search_module._bounds_of(costing)[0] / costing.step().step_s)
    assert max(shares) <= 1 + 1e-9
    assert len(shares) > 100 and sorted(shares)[len(shares) // 2] > 0.5, "a bound that says little"


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


# ---- which of equal plans


def outcome_of(chance: random.Random, costings: list[Costing]) -> Outcome:
    """Steps whose times nobody would have, but that are close to each other."""
    made = []
    for costing in costings:
        step_s = 1.0 + chance.choice((0.0, 0.004, 0.02)) * chance.random()
        stage = StageTimes(step_s, 0.0, 0.0, {"inside": chance.random() * step_s})
        made.append(Candidate(costing, Step(step_s, (stage,))))
    made.sort(key=lambda one: one.step_s)
    return Outcome(tuple(made), {}, len(made), len(made), len(made))


@pytest.mark.parametrize("nodes", [1, 2])
def test_of_plans_as_good_one_is_chosen_that_sends_little_and_a_plain_one_if_there_is_one(nodes):
    where = space(
        slow(nodes, 10.0), 32, depths=(1,), micro_batch_sizes=(1,), recomputes=(Recompute(),)
    )
    costings = [where.costing(plan) for plan in plans(where)]
    plain = ("ZeRO-3", "distributed optimizer", "plain data parallelism")
    preferred = lighter = 0
    for seed in range(300):
        outcome = outcome_of(random.Random(seed), costings)
        fastest, best = outcome.ranked[0], outcome.best
        assert best is not None
        room = max(0.5, fastest.busiest_link)
        as_good = [one for one in outcome.ranked if one.step_s <= 1.005 * fastest.step_s]
        least = min(one.costing.node_nbytes for one in as_good)
        light = [one for one in as_good if one.costing.node_nbytes <= 1.25 * least]
        named = [one for one in light if one.scheme in plain and one.busiest_link <= room]
        assert best in (named or light)
        assert best.step_s == min(one.step_s for one in named or light)
        preferred += bool(named)
        lighter += best is not fastest and not named
    assert (lighter > 30) if nodes > 1 else (preferred > 30)


@pytest.mark.parametrize("nodes, batch", [(8, 128), (2, 32)])
def test_of_steps_of_equal_length_those_that_send_less_come_first_and_then_those_that_hold_less(
    nodes, batch, monkeypatch
):
    """Whatever order the plans are looked at in."""
    where = space(load_cluster("h200").with_ranks(8 * nodes), batch, seq=8192)
    ranked = search(where).ranked
    groups: list[list[Candidate]] = []
    for one in ranked:
        if groups and one.step_s <= 1.001 * min(first.step_s for first in groups[-1]):
            groups[-1].append(one)
        else:
            groups.append([one])
    for group in groups:
        keys = [(one.costing.node_nbytes, one.costing.memory.total) for one in group]
        assert keys == sorted(keys)
    assert max(map(len, groups)) > 2
    every = list(plans(where))[::-1]
    monkeypatch.setattr(search_module, "plans", lambda _: every)
    assert [one.plan for one in search(where).ranked] == [one.plan for one in ranked]


def test_what_a_device_keeps_for_others_is_left_free():
    """A plan fits up to what is left of the memory, and not beyond."""
    cluster = load_cluster("h100").with_ranks(8)
    where = space(cluster, 16)
    for costing in map(where.costing, list(plans(where))[::7]):
        for reserved_gib in (0.0, 5.0):
            for more, fits in ((0.01, True), (-0.01, False)):
                gib = costing.memory.total / GIB + reserved_gib + more
                device = replace(cluster.device, memory_gib=gib, reserved_gib=reserved_gib)
                assert replace(costing, cluster=replace(cluster, device=device)).fits == fits


def test_buffers_of_communicators_count_in_the_memory_of_a_plan():
    """Five for sizes (8, 8, 16) on 32 ranks: two axes to gather along, three to reduce along."""
    cluster = load_cluster("ascend").with_ranks(32)
    plan = Plan(ShardSizes(8, 8, 16), Parallel(), BATCH)
    there = Costing(MODEL, plan, cluster).memory.total
    without = replace(cluster, device=replace(cluster.device, communicator_mib=0.0))
    assert there - Costing(MODEL, plan, without).memory.total == 5 * 400 * 2**20


def test_attention_takes_as_long_as_its_own_speed_says_and_nothing_else_does():
    cluster, plan = load_cluster("h100").with_ranks(8), Plan(ShardSizes(1, 1, 1), Parallel(), BATCH)
    device = cluster.device
    rate = device.tflops * device.efficiency

    def times(tflops: float) -> list[tuple[float, float]]:
        with_it = replace(cluster, device=replace(device, attention_tflops=tflops))
        costing = Costing(MODEL, plan, with_it)
        return [costing.compute.of_unit(unit) for unit in costing.units[0]]

    plain, half = times(0.0), times(rate / 2)
    for same, of_all in zip(times(rate), plain, strict=True):
        assert same == pytest.approx(of_all)
    pairs = BATCH.seq_length**2 / 2
    core_s = 4 * pairs * 32 * 128 / (1e12 * rate)
    more = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(plain, half, strict=True)]
    layers = [one for one in more if one[0] > 1e-12]
    assert len(layers) == len(MODEL.layers)
    for forward_s, backward_s in layers:
        assert forward_s == pytest.approx(core_s) and backward_s == pytest.approx(2 * core_s)
