# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the decision which parameters form a unit and which modules use it."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """A unit to be built: its parameters and the modules whose calls need them."""

    name: str
    group_key: str  # its sharding group: "dense" or "expert"
    # Equal for units of a unit module, which are needed together; "" outside of unit modules.
    layer: str
    params: tuple[tuple[str, nn.Parameter], ...]
    # A call of any of them needs the parameters. The gradient of parameters with several modules
    # is complete at the end of backward only.
    modules: tuple[nn.Module, ...]
    # Whether a captured graph reads the parameters, always at one address.
    is_seated: bool = False


def _parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def _home_of(param_name: str, unit_paths: Collection[str]) -> str:
    home = _parent_of(param_name)
    while home and home not in unit_paths:
        home = _parent_of(home)
    return home


def _call_root(root: nn.Module, paths: Sequence[str]) -> str:
    """Return the innermost called module that contains all `paths`; containers are not called."""
    common = paths[0].split(".")
    for path in paths[1:]:
        parts = path.split(".")
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        common = common[:same]
    while common and isinstance(
        root.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)
    ):
        common = common[:-1]
    return ".".join(common)


def plan_units(
    root: nn.Module,
    unit_modules: Sequence[nn.Module],
    group_key_of: Callable[[nn.Parameter], str] = lambda _: "dense",
    also_used_by: Mapping[nn.Parameter, Sequence[nn.Module]] | None = None,
) -> list[UnitPlan]:
    """Partition all parameters of `root` into units, in the order of `named_parameters`.

    A parameter belongs to the innermost of `unit_modules` around it, or to the root unit. Within
    it, another dtype, sharding group or requires_grad makes another unit, because a flat buffer has
    one dtype. Units of another group than "dense" belong to the innermost module around all of
    them. Parameters that other modules use as well (`also_used_by`, tied weights) are units of
    their own, with one layout on every pipeline stage that holds a copy.
    """
    also_used_by = also_used_by or {}
    path_of: dict[nn.Module, str] = {module: path for path, module in root.named_modules()}  # pyright: ignore[reportUnknownVariableType]
    unit_paths = {path_of[module] for module in unit_modules}
    grouped: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, param in root.named_parameters():
        kind = (group_key_of(param), param.dtype, param.requires_grad)
        key = (name,) if param in also_used_by else (_home_of(name, unit_paths), *kind)
        grouped.setdefault(key, []).append((name, param))

    plans: list[UnitPlan] = []
    num_named: Counter[str] = Counter()
    for params in grouped.values():
        first_name, first = params[0]
        group_key = group_key_of(first)
        layer = _home_of(first_name, unit_paths)
        if first in also_used_by:
            name, path = first_name, _parent_of(first_name)
        else:
            path = layer
            if group_key != "dense":
                path = _call_root(root, [_parent_of(name) for name, _ in params])
            name = path or "root"
        num_named[name] += 1
        if num_named[name] > 1:
            name = f"{name}#{num_named[name]}"
        modules = (root.get_submodule(path), *also_used_by.get(first, ()))
        plans.append(UnitPlan(name, group_key, layer, tuple(params), modules))
    return plans
