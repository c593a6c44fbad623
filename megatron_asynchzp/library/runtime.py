# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Puts the engine around a torch module: checks, groups, initial values and dtypes."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.params import refuse_params, refuse_shared_memory, refuse_views
from megatron_asynchzp.engine.zero.plan import plan_units
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.library.arguments import (
    Description,
    checked_units,
    describe,
    refuse_different_models,
    refuse_sharded,
)
from megatron_asynchzp.library.inputs import cast_inputs_of
from megatron_asynchzp.library.meta_model import is_meta, materialize


def checked_model(
    model: nn.Module, units: Iterable[nn.Module], allows_meta: bool
) -> list[nn.Module]:
    """Check all that can be checked without a process group, and return the units' modules."""
    unit_modules = checked_units(model, units)
    refuse_sharded(model)
    refuse_params(model, allows_meta)
    if not is_meta(model):
        refuse_shared_memory(model)
    refuse_views(model)
    return unit_modules


def runtime_of(
    model: nn.Module,
    unit_modules: list[nn.Module],
    sizes: ShardSizes,
    group: dist.ProcessGroup,
    schedule: ScheduleConfig,
    device: torch.device = torch.device("cpu"),
    param_dtype: torch.dtype | None = None,
    casts_inputs: bool = True,
) -> HZPRuntime:
    construction = None
    if not is_meta(model):
        refuse_different_models(model, group)
    ranks = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), ranks.index(dist.get_rank()), sizes)
    groups = ShardGroups.create(topology, group, timedelta(seconds=schedule.time_limit_s))
    all_groups = {"dense": groups}
    if is_meta(model):
        construction = _construct(model, unit_modules, all_groups, group, device)
    whole: dict[nn.Parameter, torch.Tensor] = {}
    if param_dtype is not None:
        whole = _cast_params(model, param_dtype)
        if casts_inputs:
            cast_inputs_of(dict.fromkeys((model, *unit_modules)), param_dtype)
    plans = plan_units(model, unit_modules, also_used_by=_find_shared_params(model))
    runtime = HZPRuntime(
        model,
        plans,
        all_groups,
        schedule,
        grad_scale=1.0 / len(ranks),
        construction=construction,
        allows_compiled_modules=True,
    )
    if construction is not None:
        construction.close()
    for unit in runtime.units:
        _restore_main_params(unit, whole)
    return runtime


def _construct(
    model: nn.Module,
    unit_modules: list[nn.Module],
    groups: dict[str, ShardGroups],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Construction:
    """Fill a model on the meta device; this rank keeps its part of the values."""
    seen: dict[nn.Parameter, Description] = {}

    def note(param: nn.Parameter) -> None:
        seen[param] = describe(param)

    construction = Construction(groups, prepare=note)

    def cut(unit: nn.Module) -> None:
        construction.shard(unit, alone=_find_shared_params(model))

    materialize(model, unit_modules, device, cut)
    refuse_different_models(model, group, seen)
    return construction


def _cast_params(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, torch.Tensor]:
    """Cast the parameters of `model` to `dtype`; return the values of those that are trained."""
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for param in model.parameters():
        if param.requires_grad:
            whole[param] = param.detach()
        param.data = param.detach().to(dtype)
    return whole


@torch.no_grad()
def _restore_main_params(unit: HZPUnit, whole: dict[nn.Parameter, torch.Tensor]) -> None:
    """Let the fp32 main parameters have the values that were there before they were rounded."""
    for index, param in enumerate(unit.params):
        if param in whole and unit.is_trained:
            held, main = unit.main_param.elements_of(index)
            main.copy_(whole[param].reshape(-1)[held.start : held.stop])


def _find_shared_params(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Parameters with several names, and the modules of all names but the first."""
    modules: dict[nn.Parameter, list[nn.Module]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        modules.setdefault(param, []).append(model.get_submodule(name.rpartition(".")[0]))
    return {param: users[1:] for param, users in modules.items() if len(users) > 1}
