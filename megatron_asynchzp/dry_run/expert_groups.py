# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what each choice of --asynchzp-experts-per-unit costs, by the planner's formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Experts, Layer, Model, chunk_layers, experts_numel


@dataclass(frozen=True)
class ExpertChoice:
    """per_unit: experts that form a unit, 0 for all with their layer; in_flight: bytes on a rank of
    a stage, without a budget; gathers: of one layer's experts in one micro-batch; gathered: the
    bytes that these give."""

    per_unit: int
    in_flight: float
    gathers: int
    gathered: float


def expert_choices(costing: Costing, stage: int) -> list[ExpertChoice]:
    """From all experts together to each alone; empty for a stage without experts, and where
    parameters are whole on every rank."""
    model, plan = costing.model, costing.plan
    chunks = chunk_layers(model, plan.parallel, stage)
    found = (one.mlp for layers in chunks for one in layers if isinstance(one.mlp, Experts))
    experts = next(found, None)
    if experts is None or costing.groups[plan.parallel.expert_group].sizes.param == 1:
        return []
    local = experts.num_experts // plan.parallel.ep
    nbytes = experts_numel(experts, model, plan.parallel) * model.itemsize
    schedule, choices = replace(plan.schedule, in_flight_nbytes=None), []
    unlimited = replace(costing, plan=replace(plan, schedule=schedule), known={})
    for per_unit in (0, *(n for n in range(local, 0, -1) if local % n == 0)):
        chosen = replace(unlimited, model=_with_groups(model, per_unit), known={})
        in_flight = sum(sum(chunk.allocated.values()) for chunk in chosen.in_flight_of(stage))
        groups = local // per_unit if per_unit else 1
        gathers = 2 * groups
        if _is_computed_again(plan.recompute):  # the last ones stay from there to their backward
            gathers += max(0, groups - 1 - schedule.depth)
        choices.append(ExpertChoice(per_unit, in_flight, gathers, nbytes * gathers / groups))
    return choices


def _with_groups(model: Model, per_unit: int) -> Model:
    def changed(layers: Sequence[Layer]) -> tuple[Layer, ...]:
        return tuple(
            replace(one, mlp=replace(one.mlp, per_unit=per_unit))
            if isinstance(one.mlp, Experts)
            else one
            for one in layers
        )

    return replace(model, layers=changed(model.layers), mtp=changed(model.mtp))


def _is_computed_again(recompute: Recompute) -> bool:
    return recompute.granularity == "full" or recompute.has("moe")
