# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what each choice of --asynchzp-experts-per-unit costs, by the planner's formulas."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.dry_run.pretended_world import Stage
from megatron_asynchzp.dry_run.states import needs_of, topologies_of
from megatron_asynchzp.mcore.flags.asynchzp import resolve_schedule
from megatron_asynchzp.mcore.planned_model import setting_of
from megatron_asynchzp.planner.activations import Setting
from megatron_asynchzp.planner.model import Experts, Layer, chunk_layers, experts_numel, stage_units
from megatron_asynchzp.sharding.in_flight import memory_in_flight


@dataclass(frozen=True)
class ExpertChoice:
    """per_unit: experts that form a unit, 0 for all with their layer; in_flight: bytes on a rank of
    a stage, without a budget; gathers: of one layer's experts in one micro-batch; gathered: the
    bytes that these give."""

    per_unit: int
    in_flight: float
    gathers: int
    gathered: float


def expert_choices(stage: Stage, args: Namespace) -> list[ExpertChoice]:
    """From all experts together to each alone; empty for a stage without experts, and where
    parameters are whole on every rank."""
    setting, topologies = setting_of(args), topologies_of(stage, args)
    chunks = chunk_layers(setting.model, setting.parallel, stage.index)
    found = (one.mlp for layers in chunks for one in layers if isinstance(one.mlp, Experts))
    experts = next(found, None)
    group = "expert" if setting.parallel.ep > 1 else "dense"
    if experts is None or topologies[group].sizes.param == 1:
        return []
    local = experts.num_experts // setting.parallel.ep
    nbytes = experts_numel(experts, setting.model, setting.parallel) * setting.model.itemsize
    schedule, choices = resolve_schedule(args), []
    for per_unit in (0, *(n for n in range(local, 0, -1) if local % n == 0)):
        chosen = _with_groups(setting, per_unit)
        units = stage_units(chosen.model, chosen.parallel, chosen.batch, stage.index)
        needs = needs_of(units, setting.model.itemsize, topologies, schedule.grad_slot_nbytes)
        in_flight = sum(memory_in_flight(needs, schedule.depth).allocated.values())
        groups = local // per_unit if per_unit else 1
        gathers = 2 * groups
        if _is_computed_again(setting):  # the last ones stay from there to their backward
            gathers += max(0, groups - 1 - schedule.depth)
        choices.append(ExpertChoice(per_unit, in_flight, gathers, nbytes * gathers / groups))
    return choices


def _with_groups(setting: Setting, per_unit: int) -> Setting:
    def changed(layers: Sequence[Layer]) -> tuple[Layer, ...]:
        return tuple(
            replace(one, mlp=replace(one.mlp, per_unit=per_unit))
            if isinstance(one.mlp, Experts)
            else one
            for one in layers
        )

    model = setting.model
    changes = {"layers": changed(model.layers), "mtp": changed(model.mtp)}
    return replace(setting, model=replace(model, **changes))


def _is_computed_again(setting: Setting) -> bool:
    return setting.recompute.granularity == "full" or setting.recompute.has("moe")
