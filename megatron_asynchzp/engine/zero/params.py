# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks whether parameters can be sharded; a refusal is a line with a remedy."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from megatron_asynchzp.engine.zero.tensors_within import memory_of, tensors_kept
from megatron_asynchzp.errors import ConfigurationError

TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values fp32 main parameters and gradients hold without loss."""
_OWN_OPERATIONS = "__torch_dispatch__"
"""An attribute that a wrapper class of tensors defines, such as DTensor or a quantized one."""


def titled_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its title in messages: its name and its module's class."""
    for name, param in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        yield f"{name} (in a {type(module).__name__})", param


def refuse_params(model: nn.Module, allows_meta: bool = False) -> None:
    """Raise ConfigurationError for a parameter that no unit can hold; looks at no element."""
    devices: dict[torch.device, str] = {}
    for title, param in titled_params(model):
        if (problem := _problem_of(param, allows_meta)) is not None:
            raise ConfigurationError(f"{title}: {problem}")
        devices.setdefault(param.device, title)
    if not devices:
        raise ConfigurationError(f"a {type(model).__name__} without parameters: nothing to shard")
    if len(devices) > 1:
        places = " and ".join(f"{title} is on {device}" for device, title in devices.items())
        raise ConfigurationError(f"{places}; move the whole model to one device")


def _problem_of(param: nn.Parameter, allows_meta: bool) -> str | None:
    kind, plain = type(param), torch.Tensor
    if is_lazy(param):
        return "it has no shape yet; run one forward of the model before"
    if isinstance(param, DTensor):
        dims = ", ".join(param.device_mesh.mesh_dim_names or ("without names",))
        return (
            f"it is a DTensor (mesh dimensions {dims}), whose placement the engine's flat shards "
            "would lose; shard the model before it is distributed, and for tensor parallelism use "
            "Megatron's layers with --use-asynchzp"
        )
    if getattr(kind, _OWN_OPERATIONS) is not getattr(plain, _OWN_OPERATIONS):
        return (
            f"it is a {kind.__name__}, which is no plain tensor; hand over the model before it is "
            "distributed or quantized, or replace it by a plain tensor of the same values"
        )
    if param.layout != torch.strided:
        return f"it is stored as {param.layout}; make it dense with to_dense()"
    if param.is_meta and not allows_meta:
        return "it is on the meta device, without values; allocate and initialize it before"
    if param.is_complex():
        return (
            f"{param.dtype} is not supported; make torch.view_as_real of it the parameter, and "
            "use torch.view_as_complex in forward"
        )
    if param.dtype == torch.float64:
        if param.requires_grad:
            return (
                "main parameters and gradients are fp32, in which a float64 would lose half of its "
                "digits; convert it with float(), or freeze it with requires_grad_(False)"
            )
    elif param.dtype not in TRAINED_DTYPES:
        return f"{param.dtype} is not supported; convert it to bfloat16, or make it a buffer"
    return None


class _Memory(NamedTuple):
    start: int
    stop: int
    is_dense: bool  # whether its elements fill these bytes
    title: str
    is_trained: bool

    @classmethod
    def of(cls, title: str, param: nn.Parameter) -> "_Memory":
        reach = 1 + sum(step * (size - 1) for step, size in _steps(param))
        start, nbytes = param.data_ptr(), reach * param.element_size()
        is_dense = reach == param.numel()
        return cls(start, start + nbytes, is_dense, title, param.requires_grad)


def _steps(param: nn.Parameter) -> Sequence[tuple[int, int]]:
    return list(zip(param.stride(), param.shape, strict=True))


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ConfigurationError if trained parameters share memory, which sharding would part."""
    params = [(title, param) for title, param in titled_params(model) if param.numel()]
    for title, param in params:
        if param.requires_grad and any(step == 0 and size > 1 for step, size in _steps(param)):
            raise ConfigurationError(
                f"{title}: its elements are one in memory, as after expand(), or its model is "
                "sharded already; make the parameter a clone(), or build the model again"
            )
    for first, second in pairwise(sorted(_Memory.of(title, param) for title, param in params)):
        overlaps = second.start == first.start or (first.is_dense and second.start < first.stop)
        if overlaps and (first.is_trained or second.is_trained):
            raise ConfigurationError(
                f"{first.title} and {second.title} share memory and would be trained apart; tie "
                "them as one parameter (b.weight = a.weight), or make one of them a clone()"
            )


def refuse_views(model: nn.Module) -> None:
    """Raise ConfigurationError if a buffer or attribute is a view of a parameter, which moves."""
    titles: dict[int, list[tuple[int, int, str]]] = {}
    for title, param in titled_params(model):
        if (memory := memory_of(param.data)) is not None:
            titles.setdefault(memory[0], []).append((*memory[1:], title))
    own = set(model.parameters())
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    for path, tensor in tensors_kept(modules):
        memory = None if tensor in own else memory_of(tensor)
        for start, stop, title in [] if memory is None else titles.get(memory[0], []):
            if memory is not None and start < memory[2] and memory[1] < stop:
                raise ConfigurationError(
                    f"{path} is a view of {title}, and would keep the values of now: make it in "
                    "forward or as a property, or let it be a clone()"
                )


def check_kept_views(unit: str, storage: int, root: nn.Module, users: Sequence[nn.Module]) -> None:
    """Raise ConfigurationError if `root` or a module of `users` keeps a view into `storage`."""
    parts = {part for user in users for part in user.modules()} | {root}
    modules: dict[str, nn.Module] = dict(root.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    named = {name: part for name, part in modules.items() if part in parts}
    for path, tensor in tensors_kept(named):
        memory = None if isinstance(tensor, nn.Parameter) else memory_of(tensor)
        if memory is not None and memory[0] == storage:
            raise ConfigurationError(
                f"{path} keeps a view of parameters of {unit} after forward, and would "
                "keep their values of now: make it in each forward, or let it be a clone()"
            )
