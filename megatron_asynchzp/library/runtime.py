# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the engine around a torch module: groups, initial values, dtypes and this rank's parts."""

from datetime import timedelta

import torch
from torch import nn

from megatron_asynchzp.engine.at_rest.host_states import move_to_host
from megatron_asynchzp.engine.comm.agreement import Description, describe
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.guard import SHARDED_AS
from megatron_asynchzp.engine.zero.plan import plan_units
from megatron_asynchzp.engine.zero.unit import Fragment
from megatron_asynchzp.library.arguments import ShardCall, check_values
from megatron_asynchzp.library.meta_model import materialize, shared_params


def runtime_of(
    model: nn.Module, unit_modules: list[nn.Module], call: ShardCall
) -> tuple[HZPRuntime, list[Fragment]]:
    """Build the engine around a model that all ranks have alike, and this rank's parts."""
    time_limit = timedelta(seconds=call.schedule.time_limit_s)
    groups = {"dense": ShardGroups.create(call.topology, call.group, time_limit)}
    construction = None
    if any(param.is_meta for param in model.parameters()):
        seen: dict[nn.Parameter, Description] = {}
        construction = Construction(
            groups, prepare=lambda param: seen.update({param: describe(param)})
        )
        materialize(model, unit_modules, call.device, construction.shard)
        check_values(model, call.group, next(model.parameters()).device, seen)
    whole: dict[nn.Parameter, torch.Tensor] = {}  # the fp32 values of trained parameters
    if call.param_dtype is not None:
        whole = {param: param.data for param in model.parameters() if param.requires_grad}
        for param in model.parameters():
            param.data = param.data.to(call.param_dtype)
    shared = shared_params(model)
    plans = plan_units(model, unit_modules, also_used_by=shared)
    runtime = HZPRuntime(
        model,
        plans,
        groups,
        call.schedule,
        grad_scale=1.0 / call.group.size(),
        construction=construction,
        allows_compiled_modules=True,
    )
    if construction is not None:
        construction.close()
    for unit in runtime.units:
        for index, param in enumerate(unit.params):
            if param in whole and unit.is_trained:
                held, main = unit.main_param.elements_of(index)
                main.copy_(whole[param].reshape(-1)[held.start : held.stop])
    move_to_host([runtime], call.offload)
    parts = [part for unit in runtime.units for part in unit.new_fragments()]
    for part in (part for part in parts if part.unit.is_trained):
        given = vars(part.unit.params[part.index]).items()  # callers build groups by them
        vars(part.param).update(item for item in given if item[0] != SHARDED_AS)
    return runtime, parts
