# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank: the paper's formula at rest, the engine's counters, units of a model, and what
peaks consist of."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import nn

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing, Plan
from megatron_asynchzp.planner.memory import Activations, Memory, state_nbytes
from megatron_asynchzp.planner.model import (
    Attention,
    Batch,
    Experts,
    Layer,
    Mlp,
    Model,
    Parallel,
    Unit,
    chunk_layers,
    stage_units,
)
from megatron_asynchzp.planner.traffic import Wire
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.in_flight import least_in_flight, memory_in_flight
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.step import StepScheduler
from megatron_asynchzp.zero.unit import HZPUnit
from tests.support.engine import nested_sizes
from tests.support.recording_device import Group

_DENSE, _MIXED = (
    Layer(Attention(8, 4, 16), Mlp(256, True)),
    Layer(Attention(8, 4, 16), Experts(8, 2, 64, True, shared_ffn=64)),
)
_MODEL = Model(128, 512, (_DENSE, _MIXED) * 6, is_tied=False)
_BATCH = Batch(1, 64, 8)


def test_at_rest_a_rank_holds_2n_over_p_4n_over_g_and_12n_over_o_bytes():
    for param, grad, optim in product((1, 2, 4), repeat=3):
        sizes = ShardSizes(param, grad, optim)
        held = sum(state_nbytes(960, 2, sizes).values())
        assert held == 2 * 960 / param + 4 * 960 / grad + 12 * 960 / optim
        assert sum(state_nbytes(960, 2, sizes, moments=4).values()) == held - 4 * 960 / optim
        fp32 = sum(state_nbytes(960, 4, sizes).values())
        assert fp32 == 4 * 960 / param + 4 * 960 / grad + 8 * 960 / optim


def test_experts_are_divided_by_the_sizes_of_their_own_group():
    """Also where they are copied elsewhere because tensor parallelism does not divide them."""
    link = Link(1.0)
    for parallel in (Parallel(ep=2), Parallel(tp=2, expert_tp=1)):
        plan = Plan(ShardSizes(4, 4, 8), parallel, _BATCH, expert_sizes=ShardSizes(2, 2, 4))
        cluster = Cluster("c", 1, 8 * parallel.tp, Device(1.0, 80), link, link)
        held = Costing(_MODEL, plan, cluster).states_by_formula(0)
        units = stage_units(_MODEL, parallel, _BATCH, 0)
        keys = ("dense", "expert")
        dense, expert = (sum(u.numel for u in units if u.group == key) for key in keys)
        assert expert == 6 * 8 * 3 * 128 * 64 / parallel.ep
        assert held["model_param"] == 2 * dense / 4 + 2 * expert / 2
        assert held["main_param"] == 4 * dense / 8 + 4 * expert / 4


@pytest.mark.parametrize("virtual", [1, 3])
def test_stages_share_out_every_layer_once(virtual):
    whole = sum(unit.numel for unit in stage_units(_MODEL, Parallel(), _BATCH, 0))
    for pp in (1, 2, 4):
        parallel = Parallel(pp=pp, virtual=virtual)
        units = [stage_units(_MODEL, parallel, _BATCH, stage) for stage in range(pp)]
        assert sum(unit.numel for stage in units for unit in stage) == whole
        flops = sum(unit.flops for stage in units for unit in stage)
        assert flops == pytest.approx(sum(u.flops for u in stage_units(
            _MODEL, Parallel(), _BATCH, 0)))  # fmt: skip


def test_layers_that_no_equal_shares_divide_are_refused_unless_they_are_given():
    with pytest.raises(ValueError, match="12 layers on 5 model chunks"):
        chunk_layers(_MODEL, Parallel(pp=5), 0)
    given = Parallel(pp=2, stage_layers=(5, 7))
    assert [len(chunk_layers(_MODEL, given, stage)[0]) for stage in (0, 1)] == [5, 7]
    with pytest.raises(ValueError, match="are not 12 layers"):
        chunk_layers(_MODEL, replace(given, stage_layers=(5, 5)), 0)


def test_tensor_and_expert_parallelism_divide_parameters_and_flops():
    whole, half = (stage_units(_MODEL, Parallel(tp=tp, expert_tp=tp), _BATCH, 0) for tp in (1, 2))
    replicated = (2 * 12 + 1) * 128 + 6 * 8 * 128  # norms, routers
    numel = [sum(unit.numel for unit in units) for units in (whole, half)]
    assert numel[1] == (numel[0] - replicated) / 2 + replicated
    spread = stage_units(_MODEL, Parallel(ep=4), _BATCH, 0)
    of_experts = 6 * 8 * 3 * 128 * 64
    assert sum(unit.numel for unit in spread) == numel[0] - of_experts * 3 / 4
    assert sum(unit.numel for unit in spread if unit.group == "expert") == of_experts / 4
    assert {unit.group for unit in whole} == {"dense"}


@dataclass(frozen=True)
class Case:
    """A model and a plan, as the planner and as the engine have them."""

    costing: Costing

    @property
    def config(self) -> ScheduleConfig:
        return self.costing.plan.schedule

    @classmethod
    def random(cls, seed: int) -> "Case":
        """Of a model whose tensors are multiples of 64 elements, as those of real ones."""
        chance = random.Random(seed)
        attention = Attention(chance.choice((2, 4)), 2, 32)
        mlps = Mlp(128, chance.random() < 0.5), Experts(4, 2, 64, True)
        layers = [Layer(attention, chance.choice(mlps)) for _ in range(4)]
        model = Model(
            chance.choice((64, 128)),
            64 * chance.randint(1, 6),
            tuple(layers),
            is_tied=chance.random() < 0.5,
            norm_numel=chance.choice((1, 2)),
            num_positions=chance.choice((0, 8)),
            itemsize=chance.choice((2, 4)),
        )
        parallel = Parallel(pp=chance.choice((1, 2)), ep=chance.choice((1, 2)))
        sizes = ShardSizes(*chance.choice(nested_sizes(8 // parallel.pp)))
        wire = Wire(chance.choice((2, 4)))
        schedule = ScheduleConfig(
            "main-thread",
            chance.randint(0, 3),
            grad_slot_nbytes=chance.choice((2**16, 2**28)),
            checks_order=False,
        )
        plan = Plan(sizes, parallel, _BATCH, schedule, wire=wire)
        device, link = Device(1.0, 80), Link(1.0)
        case = cls(Costing(model, plan, Cluster("c", 1, 8, device, link, link)))
        return case._limited(chance.random()) if chance.random() < 0.5 else case

    def _limited(self, share: float) -> "Case":
        """With a budget for memory in flight that is enough for every stage."""
        plan, budget = self.costing.plan, 0
        for stage in range(plan.parallel.pp):
            needs = [
                one.in_flight(self.config.grad_slot_nbytes) for one in self.engine_units(stage)
            ]
            most = memory_in_flight(needs, self.config.depth)
            least = sum(least_in_flight(needs))
            budget = max(budget, least + round(share * (most.params + most.grads - least)))
        schedule = replace(self.config, in_flight_nbytes=budget)
        return Case(replace(self.costing, plan=replace(plan, schedule=schedule)))

    def engine_units(self, stage: int) -> list[HZPUnit]:
        """Of the stage's first rank."""
        plan, model = self.costing.plan, self.costing.model
        itemsize = plan.wire.grad_itemsize
        ranks = {
            "dense": 8 // plan.parallel.pp,
            "expert": 8 // plan.parallel.pp // plan.parallel.ep,
        }
        groups = {
            key: ShardGroups.of_topology(
                ShardTopology(count, 0, plan.sizes.restricted_to(count)),
                range(count),
                Group,
                torch.bfloat16 if itemsize == 2 else torch.float32,
            )
            for key, count in ranks.items()
        }
        dtype = torch.bfloat16 if model.itemsize == 2 else torch.float32
        return [
            HZPUnit(
                unit.name,
                [
                    (str(index), nn.Parameter(torch.zeros(shape, dtype=dtype)))
                    for index, shape in enumerate(_shapes(unit, model, plan.parallel.ep))
                ],
                groups[unit.group],
                layer=unit.layer,
            )
            for unit in self.costing.units[stage]
            if unit.numel
        ]


def _shapes(unit: Unit, model: Model, ep: int) -> list[tuple[int, ...]]:
    """Of the tensors that Megatron's modules have."""
    hidden = model.hidden
    norm = [(hidden,)] * model.norm_numel
    words = (model.vocabulary, hidden)
    match unit.kind:
        case "embedding":
            has_positions = model.num_positions > 0 and not model.is_tied
            return [words] + [(model.num_positions, hidden)] * has_positions
        case "positions":
            return [(model.num_positions, hidden)]
        case "output":
            return [words]
        case "root":
            return norm
    assert unit.source is not None and isinstance(unit.source.mixer, Attention)
    mixer, mlp = unit.source.mixer, unit.source.mlp
    width = mixer.num_heads * mixer.head_dim
    keys = 2 * mixer.num_groups * mixer.head_dim
    attention = [*norm, (width + keys, hidden), (hidden, width), *norm]
    if isinstance(mlp, Mlp):
        return [*attention, (mlp.ffn * (1 + mlp.is_gated), hidden), (hidden, mlp.ffn)]
    assert isinstance(mlp, Experts)
    experts = [(2 * mlp.ffn, hidden), (hidden, mlp.ffn)] * (mlp.num_experts // ep)
    router = [(mlp.num_experts, hidden)]
    if unit.kind == "experts":
        return experts
    return [*attention, *router, *(experts if ep == 1 else [])]


def test_100_random_plans_take_the_bytes_that_the_engines_counters_have():
    """Its buffers, its arenas, and what Adam holds of a rank's own parameters."""
    for seed in range(100):
        case = Case.random(seed)
        for stage in range(case.costing.plan.parallel.pp):
            planned = case.costing.stage_memory(stage)
            scheduler = StepScheduler(case.engine_units(stage), case.config)
            counted = Counter(scheduler.state_nbytes())
            for unit in scheduler.units:
                counted["optimizer_moments"] += sum(8 * own.numel() for own in unit.owned_params())
            assert planned.at_rest == counted, (seed, stage)
            assert planned.in_flight == scheduler.in_flight_nbytes(), (seed, stage)
            assert planned.own_grads == scheduler.memory.own_grads, (seed, stage)
            scheduler.close()


def _memory(**rest) -> Memory:
    at_rest = {
        "model_param": 10.0,
        "main_grad": 20.0,
        "main_param": 20.0,
        "optimizer_moments": 40.0,
    }
    return Memory(at_rest, {"param_ring": 5.0, "grad_ring": 10.0}, 8.0, Activations(**rest))


def test_the_total_is_the_higher_of_the_start_and_of_the_two_peaks_of_a_step():
    small = {"kept": 1.0, "logits": 2.0, "working": 3.0, "whole_layer": 100.0}
    assert _memory(**small).total == 90 + 15 + 1 + 3
    assert _memory(**(small | {"logits": 7.0})).total == 90 + 15 + 1 + 7
    assert _memory(**(small | {"buffer": 4.0})).total == 90 + 15 + 1 + 3 + 4
    assert _memory(**(small | {"whole_layer": 6.0})).total == 90 + 15 + 1 + 3 + (8 - 6)
    start = 50 + 15 + 8  # moments come with the first update
    assert _memory(**small).start == start
    assert replace(_memory(**(small | {"whole_layer": 6.0})), own_grads=10.0).working == 3 + 4
    copied = replace(_memory(**small), copied_params=6.0, copied_grads=9.0)
    assert copied.total == 90 + 15 + 1 + 9
    assert replace(_memory(**small, kept_layer=5.0), copied_params=6.0, copied_grads=9.0).total == (
        90 + 15 + 1 + 6
    )
    assert replace(copied, copies_beside=True).total == 90 + 15 + 1 + 3 + 6 + 9
    unheld = replace(_memory(**small), at_rest={"model_param": 10.0, "optimizer_moments": 0.0})
    assert unheld.left_of(100.0) == 100.0 - max(10 + 15 + 8, 10 + 15 + 1 + 3)
