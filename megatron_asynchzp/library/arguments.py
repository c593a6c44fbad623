# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `shard`: each mistake ends in one line, on every rank."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.comm.agreement import (
    Description,
    check_same_settings,
    describe,
    hash_of_text,
    is_same_everywhere,
    process_settings,
    text_of,
)
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.guard import SHARDED_AS
from megatron_asynchzp.engine.zero.params import refuse_params, refuse_shared_memory, refuse_views
from megatron_asynchzp.errors import ConfigurationError, raise_first

_REPLICATING = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_GRAPHS, _GRAPHED = ("CUDAGraph", "NPUGraph"), "make_graphed_callables"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OPTIMIZER = "lambda params: torch.optim.AdamW(params, lr=1e-3)"


@dataclass(frozen=True, eq=False)
class ShardCall:
    """The checked arguments of `shard`, except the model and its units."""

    topology: ShardTopology
    new_optimizer: Callable[..., Any]
    group: dist.ProcessGroup
    schedule: ScheduleConfig
    param_dtype: torch.dtype | None
    casts_inputs: bool
    device: torch.device  # of a model that is on the meta device
    offload: float


def checked_call(
    sizes: Any = None,
    optimizer: Any = None,
    group: Any = None,
    schedule: Any = ScheduleConfig(),
    param_dtype: Any = None,
    cast_forward_inputs: Any = True,
    device: Any = None,
    offload: Any = 0.0,
) -> ShardCall:
    """Check the arguments that need neither the model nor other ranks."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    if is_made or not callable(optimizer):
        value = f"a {type(optimizer).__name__}" if is_made else repr(optimizer)
        raise ConfigurationError(
            f"optimizer is {value}; pass a function of this rank's parts, such as {_OPTIMIZER}"
        )
    raise_first(_faults_of_group(group))
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    group = group or dist.distributed_c10d._get_default_group()
    if isinstance(sizes, DeviceMesh):
        sizes = sizes_of_mesh(sizes)
    ranks = dist.get_process_group_ranks(group)
    sizes = default_sizes(len(ranks)) if sizes is None else sizes
    raise_first(_faults_of(sizes, schedule, offload, cast_forward_inputs, param_dtype))
    topology = ShardTopology(len(ranks), ranks.index(dist.get_rank()), sizes)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    of_rank = torch.device(device), float(offload)
    return ShardCall(
        topology, optimizer, group, schedule, param_dtype, cast_forward_inputs, *of_rank
    )


def _faults_of_group(group: Any) -> Iterator[str]:
    if not dist.is_initialized():
        yield (
            "torch.distributed is not initialized; call torch.distributed.init_process_group() "
            "first, and start the script with torchrun"
        )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        yield (
            f"group is a mesh of {group.ndim} dimensions; hand over one of them, as mesh['dp'], "
            "and say with sizes how many ranks share a copy"
        )
    if not isinstance(group, (DeviceMesh, dist.ProcessGroup, type(None))):
        yield (
            f"group is a {type(group).__name__}; it is to be a process group, a mesh of one "
            "dimension, or None for all ranks"
        )


def default_units(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules that have several of one class."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        count = Counter(type(child) for child in model if any(True for _ in child.parameters()))
        if layers := [child for child in model if count[type(child)] > 1]:
            return layers
    return [unit for child in model.children() for unit in default_units(child)]


def default_sizes(num_ranks: int) -> ShardSizes:
    """Shard parameters and gradients within a node, and optimizer states over all ranks."""
    node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_ranks % node:
        node = num_ranks
    return ShardSizes(node, node, num_ranks).with_short_axes(node)


def checked_units(model: nn.Module, units: Any, param_dtype: Any) -> list[nn.Module]:
    """Return the modules of `units`, or the default ones; check that they can be units."""
    listed: list[nn.Module] = []  # filled by the check, for an iterator of units runs once
    raise_first(_faults_of_model(model, units, param_dtype, listed))
    refuse_params(model, allows_meta=True)
    if not any(param.is_meta for param in model.parameters()):
        refuse_shared_memory(model)
    refuse_views(model)
    return list(dict.fromkeys(listed))


def _faults_of_model(model: Any, units: Any, param_dtype: Any, listed: list[Any]) -> Iterator[str]:
    if not isinstance(model, nn.Module):
        yield f"model is a {type(model).__name__}; it is to be an nn.Module"
    if isinstance(units, nn.Module) and not isinstance(units, Iterable):
        yield f"units is one {type(units).__name__}; hand over a list, as units=model.layers"
    listed.extend(default_units(model) if units is None else units)
    yield from _faults_of_units(model, listed)
    yield from faults_of_sharded(model)
    yield from _faults_of_casts(model) if param_dtype is not None else ()


def _faults_of_units(model: nn.Module, units: Iterable[Any]) -> Iterator[str]:
    paths = {module: path for path, module in model.named_modules()}
    for unit in units:
        kind = type(unit).__name__
        if not isinstance(unit, nn.Module):
            value = unit.__name__ if isinstance(unit, type) else repr(unit)
            yield (
                f"units has {value}, which is no module; hand over the modules themselves, as "
                "[m for m in model.modules() if isinstance(m, Block)]"
            )
        elif unit not in paths:
            yield (
                f"units has a {kind} that is not a part of the model; take units from the model "
                "that is sharded"
            )
        elif isinstance(unit, _CONTAINERS):
            yield (
                f"units has {paths[unit]}, a {kind}, which is never called itself; hand over its "
                f"members, as units=model.{paths[unit]}"
            )


def _faults_of(
    sizes: Any, schedule: Any, offload: Any, casts_inputs: Any, param_dtype: Any
) -> Iterator[str]:
    if not isinstance(sizes, ShardSizes):
        yield (
            f"sizes is {sizes!r}; it is to be ShardSizes(param, grad, optim), each a number of "
            "ranks that share one copy, or a mesh"
        )
    if not isinstance(schedule, ScheduleConfig):
        allowed = "a ScheduleConfig, as ScheduleConfig('inline')"
        yield f"schedule is {schedule!r}; it is to be {allowed}"
    is_number = isinstance(offload, (int, float)) and not isinstance(offload, bool)
    if not (is_number and 0 <= offload <= 1):
        allowed = "the part of the optimizer states that is on the host, from 0 to 1"
        yield f"offload is {offload!r}; it is to be {allowed}"
    if not isinstance(casts_inputs, bool):
        yield f"cast_forward_inputs is {casts_inputs!r}; it is to be True or False"
    if param_dtype not in (None, torch.bfloat16, torch.float16):
        allowed = "torch.bfloat16, torch.float16, or None for the dtypes that the model has"
        yield f"param_dtype is {param_dtype!r}; it is to be {allowed}"


def _faults_of_casts(model: nn.Module) -> Iterator[str]:
    for name, param in model.named_parameters():
        if param.is_meta:
            yield (
                f"{name} is on the meta device, where param_dtype has no fp32 values to start "
                "from; build the model in that dtype, and give exact values with load_full_params()"
            )
        if param.requires_grad and param.dtype != torch.float32:
            yield (
                f"{name} is {param.dtype}; param_dtype is for models whose trained parameters are "
                "fp32, leave it out"
            )


def _is_compiled_with_graphs(one: Any) -> bool:
    options_of = getattr(one, "get_compiler_config", None)  # torch.compile's mark
    options: Any = options_of() if callable(options_of) else None
    return isinstance(options, dict) and bool(cast(Any, options).get("triton.cudagraphs"))


def faults_of_sharded(model: nn.Module) -> Iterator[str]:
    """Yield why a model that is sharded, replicated, captured or made for inference is refused."""
    for path, module in model.named_modules():
        if isinstance(module, _REPLICATING):
            kind = type(module).__name__
            yield (
                f"{path or 'the model'} is a {kind}, which reduces gradients itself; hand over the "
                "module in it, before it is wrapped"
            )
        for one in [module, *tree_leaves([*vars(module).values()])]:
            if (one is module or not isinstance(one, nn.Module)) and _is_compiled_with_graphs(one):
                yield (
                    f"{path or 'the model'} is compiled with CUDA graphs (mode "
                    '"reduce-overhead" or "max-autotune"), which read parameters where they lie '
                    "now; compile it without them"
                )
            if type(one).__name__ in _GRAPHS or _GRAPHED in getattr(one, "__qualname__", ""):
                yield (
                    f"{path or 'the model'} has a captured graph, which reads parameters where "
                    "they lie now; hand over the model before it is captured"
                )
    for name, param in model.named_parameters():
        if hasattr(param, SHARDED_AS):
            yield (
                f"{name} is sharded already; call shard once for each model, with all its units, "
                "and build the model again to shard it otherwise"
            )
        if not is_lazy(param) and param.is_inference():
            yield (
                f"{name} was made in torch.inference_mode, and cannot be trained; build the model "
                "outside of it"
            )


ALIKE = "call shard with the same arguments on every rank of the group"


def sizes_of_mesh(mesh: DeviceMesh) -> ShardSizes:
    """Shard over the last dimension of `mesh` and replicate over the one before."""
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim > 2 or ranks != list(range(dist.get_world_size())):
        raise ConfigurationError(
            f"sizes is a mesh of {mesh.ndim} dimensions over ranks {ranks}; hand over one of all "
            "ranks in order, of one dimension or of two (replicate, shard), or ShardSizes"
        )
    size = mesh.size(mesh.ndim - 1)
    return ShardSizes(size, size, size)


def check_model(model: nn.Module, units: Iterable[nn.Module], call: ShardCall) -> None:
    """Refuse models and calls that differ between ranks. Collective."""
    is_meta = any(param.is_meta for param in model.parameters())
    device = call.device if is_meta else next(model.parameters()).device
    paths = {module: path for path, module in model.named_modules()}
    found = {"sizes": text_of(call.topology.sizes), "param_dtype": text_of(call.param_dtype)}
    found["cast_forward_inputs"] = text_of(call.casts_inputs)
    found["offload"] = text_of(call.offload)
    found |= {f"schedule.{name}": text_of(value) for name, value in vars(call.schedule).items()}
    found |= {f"units[{place}]": paths[unit] for place, unit in enumerate(units)}
    found["the model's device"] = f"meta, filled on {device.type}" if is_meta else device.type
    check_same_settings(found | process_settings(), call.group, device, ALIKE)
    check_values(model, call.group, device)


@torch.no_grad()
def check_values(
    model: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    known: Mapping[nn.Parameter, Description] = MappingProxyType({}),
) -> None:
    """Refuse parameters and buffers that differ between ranks. Collective.

    known: Descriptions of parameters that this rank has only a part of.
    """
    lines = {
        name: known[param] if param in known else describe(param)
        for name, param in model.named_parameters()
    }
    lines |= {name: describe(buffer) for name, buffer in model.named_buffers()}
    if is_same_everywhere(hash_of_text(repr(list(lines.items()))), group, device):
        return
    all_lines: list[dict[str, Description]] = [{}] * group.size()
    dist.all_gather_object(all_lines, lines, group=group)
    for name in dict.fromkeys(name for each in all_lines for name in each):
        of_ranks = [each.get(name) for each in all_lines]
        rank = next((rank for rank, line in enumerate(of_ranks) if line != of_ranks[0]), None)
        if rank is not None:
            raise ConfigurationError(_difference(name, of_ranks[0], of_ranks[rank], rank))
    raise ConfigurationError(
        "the ranks have the same parameters and buffers in another order; build the model alike on "
        "every rank"
    )


def _difference(name: str, first: Description | None, line: Description | None, rank: int) -> str:
    if first is not None and line is not None and first[0] == line[0]:
        return (
            f"{name} has other values on rank {rank} than on rank 0; seed all ranks alike before "
            "the model is built (torch.manual_seed(0)), or load the same values"
        )
    here, there = (one[0] if one else "missing" for one in (first, line))
    return (
        f"{name} is {here} on rank 0 and {there} on rank {rank}; build the same model on every rank"
    )
