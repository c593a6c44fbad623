# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `shard`: each mistake ends in one line, on every rank."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.comm.agreement import (
    check_same_settings,
    hash_of_text,
    is_same_everywhere,
    optimizer_settings,
    process_settings,
    text_of,
)
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.engine.sharding.value_hash import value_hash
from megatron_asynchzp.engine.zero.guard import SHARDED_AS
from megatron_asynchzp.errors import ConfigurationError

_REPLICATING = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_GRAPHS, _GRAPHED = ("CUDAGraph", "NPUGraph"), "make_graphed_callables"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OPTIMIZER = "lambda params: torch.optim.AdamW(params, lr=1e-3)"


def checked_group(group: Any) -> dist.ProcessGroup:
    """Return the process group that `group` (None, a group or a 1-D DeviceMesh) stands for."""
    if not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() "
            "first, and start the script with torchrun"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigurationError(
                f"group is a mesh of {group.ndim} dimensions; hand over one of them, as "
                "mesh['dp'], and say with sizes how many ranks share a copy"
            )
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"group is a {type(group).__name__}; it is to be a process group, a mesh of one "
            "dimension, or None for all ranks"
        )
    return group or dist.distributed_c10d._get_default_group()


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


def checked_units(model: nn.Module, units: Any) -> list[nn.Module]:
    """`units`, which are to be modules within `model` that are called."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}; it is to be an nn.Module")
    if isinstance(units, nn.Module) and not isinstance(units, Iterable):
        raise ConfigurationError(
            f"units is one {type(units).__name__}; hand over a list, as units=model.layers"
        )
    paths = {module: path for path, module in model.named_modules()}
    checked: list[nn.Module] = []
    for unit in units:
        if not isinstance(unit, nn.Module):
            found = unit.__name__ if isinstance(unit, type) else repr(unit)
            raise ConfigurationError(
                f"units has {found}, which is no module; hand over the modules themselves, as "
                "[m for m in model.modules() if isinstance(m, Block)]"
            )
        if unit not in paths:
            raise ConfigurationError(
                f"units has a {type(unit).__name__} that is not a part of the model; take units "
                "from the model that is sharded"
            )
        if isinstance(unit, _CONTAINERS):
            raise ConfigurationError(
                f"units has {paths[unit]}, a {type(unit).__name__}, which is never called itself; "
                f"hand over its members, as units=model.{paths[unit]}"
            )
        if unit not in checked:
            checked.append(unit)
    return checked


def refuse_arguments(sizes: Any, schedule: Any, offload: Any, casts_inputs: Any) -> None:
    """Refuse arguments of another kind than `shard` takes."""
    is_number = isinstance(offload, (int, float)) and not isinstance(offload, bool)
    for name, value, is_allowed, allowed in (
        (
            "sizes",
            sizes,
            isinstance(sizes, ShardSizes),
            "ShardSizes(param, grad, optim), each a number of ranks that share one copy, or a mesh",
        ),
        (
            "schedule",
            schedule,
            isinstance(schedule, ScheduleConfig),
            "a ScheduleConfig, as ScheduleConfig('inline')",
        ),
        (
            "offload",
            offload,
            is_number and 0 <= offload <= 1,
            "the part of the optimizer states that is on the host, from 0 to 1",
        ),
        ("cast_forward_inputs", casts_inputs, isinstance(casts_inputs, bool), "True or False"),
    ):
        if not is_allowed:
            raise ConfigurationError(f"{name} is {value!r}; it is to be {allowed}")


def refuse_param_dtype(dtype: Any, model: nn.Module) -> None:
    """Raise ConfigurationError for a dtype in which no fp32 model computes."""
    if dtype is None:
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            f"param_dtype is {dtype!r}; it is to be torch.bfloat16, torch.float16, or None for the "
            "dtypes that the model has"
        )
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ConfigurationError(
                f"{name} is on the meta device, where param_dtype has no fp32 values to start "
                "from; build the model in that dtype, and give exact values with load_full_params()"
            )
        if param.requires_grad and param.dtype != torch.float32:
            raise ConfigurationError(
                f"{name} is {param.dtype}; param_dtype is for models whose trained parameters are "
                "fp32, leave it out"
            )


def checked_optimizer(optimizer: Any) -> Callable[..., Any]:
    """`optimizer`, which is to be a function that makes one."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    if is_made or not callable(optimizer):
        found = f"a {type(optimizer).__name__}" if is_made else repr(optimizer)
        raise ConfigurationError(
            f"optimizer is {found}; hand over what makes it of this rank's parts, as {_OPTIMIZER}"
        )
    return optimizer


def _is_compiled_with_graphs(one: Any) -> bool:
    options_of = getattr(one, "get_compiler_config", None)  # torch.compile's mark
    options: Any = options_of() if callable(options_of) else None
    return isinstance(options, dict) and bool(cast(Any, options).get("triton.cudagraphs"))


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that is sharded, replicated, captured in a graph or made for inference."""
    for path, module in model.named_modules():
        if isinstance(module, _REPLICATING):
            kind = type(module).__name__
            raise ConfigurationError(
                f"{path or 'the model'} is a {kind}, which reduces gradients itself; hand over the "
                "module in it, before it is wrapped"
            )
        for one in [module, *tree_leaves([*vars(module).values()])]:
            if (one is module or not isinstance(one, nn.Module)) and _is_compiled_with_graphs(one):
                raise ConfigurationError(
                    f"{path or 'the model'} is compiled with CUDA graphs (mode "
                    '"reduce-overhead" or "max-autotune"), which read parameters where they lie '
                    "now; compile it without them"
                )
            if type(one).__name__ in _GRAPHS or _GRAPHED in getattr(one, "__qualname__", ""):
                raise ConfigurationError(
                    f"{path or 'the model'} has a captured graph, which reads parameters where "
                    "they lie now; hand over the model before it is captured"
                )
    for name, param in model.named_parameters():
        if hasattr(param, SHARDED_AS):
            raise ConfigurationError(
                f"{name} is sharded already; call shard once for each model, with all its units, "
                "and build the model again to shard it otherwise"
            )
        if not is_lazy(param) and param.is_inference():
            raise ConfigurationError(
                f"{name} was made in torch.inference_mode, where nothing that is made can be "
                "trained; build the model outside of it"
            )


_ALIKE = "call shard with the same arguments on every rank of the group"


def refuse_other_arguments(
    model: nn.Module,
    units: Iterable[nn.Module],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: ShardSizes,
    schedule: ScheduleConfig,
    param_dtype: torch.dtype | None,
    cast_forward_inputs: bool,
    offload: float,
) -> None:
    """Refuse calls of `shard` that differ between the ranks of `group`. Collective."""
    paths = {module: path for path, module in model.named_modules()}
    found = {"sizes": text_of(sizes), "param_dtype": text_of(param_dtype)}
    found["cast_forward_inputs"] = text_of(cast_forward_inputs)
    found["offload"] = text_of(float(offload))
    found |= {f"schedule.{name}": text_of(value) for name, value in vars(schedule).items()}
    found |= {f"units[{place}]": paths[unit] for place, unit in enumerate(units)}
    is_meta = any(param.is_meta for param in model.parameters())
    found["the model's device"] = "meta" if is_meta else device.type
    check_same_settings(found | process_settings(), group, device, _ALIKE)


def refuse_other_optimizers(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """As refuse_other_arguments, for the optimizer that was made. names: of its parameters."""
    found = {"optimizer": type(optimizer).__qualname__}
    found |= optimizer_settings(optimizer.param_groups)
    for index, settings in enumerate(optimizer.param_groups):
        for param in settings["params"]:
            found[f"the optimizer's group of {names.get(param, 'nothing')}"] = str(index)
    check_same_settings(found, group, device, _ALIKE)


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


Description = tuple[str, int]
"""What is to be equal of a tensor on all ranks, in words, and a hash of its values."""


@torch.no_grad()
def refuse_different_models(
    model: nn.Module,
    group: dist.ProcessGroup,
    known: Mapping[nn.Parameter, Description] = MappingProxyType({}),
) -> None:
    """Refuse models that differ between the ranks of `group`. Collective.

    Args:
        model: Its parameters and buffers need the same names, shapes, dtypes and values.
        group: The ranks that are compared.
        known: Descriptions of parameters that this rank has only a part of.
    """
    lines = {
        name: known[param] if param in known else describe(param)
        for name, param in model.named_parameters()
    }
    lines |= {name: describe(buffer) for name, buffer in model.named_buffers()}
    mine = hash_of_text(repr(list(lines.items())))
    if is_same_everywhere(mine, group, next(model.parameters()).device):
        return
    all_lines: list[dict[str, Description]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(all_lines, lines, group=group)
    names = dict.fromkeys(name for one in all_lines for name in one)
    for name in names:
        found = [one.get(name) for one in all_lines]
        other = next((rank for rank, line in enumerate(found) if line != found[0]), None)
        if other is not None:
            raise ConfigurationError(_difference(name, found[0], found[other], other))
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


def describe(tensor: torch.Tensor) -> Description:
    """Describe a parameter or buffer that is whole."""
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    kind = (
        "a buffer" if not isinstance(tensor, nn.Parameter) else "" if is_trained else "not trained"
    )
    words = f"{tensor.dtype} of shape {tuple(tensor.shape)}" + (f", {kind}" if kind else "")
    # A wrapper (a DTensor, a quantized tensor) has no elements of its own to look at.
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return words, 0
    return words, int(value_hash([tensor], tensor.device))
