# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the decision which parameters form a unit and which modules use it. Pure bookkeeping on a
module tree: must not know tensors' contents, groups or hooks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class UnitPlan:
    """One unit to be: its parameters and the modules whose calls need them.

    group_key: which sharding group ("dense", "expert"); modules: any call of one of them needs
    the parameters. The gradient of parameters with several modules is complete only at the end
    of backward.
    """

    name: str
    group_key: str
    params: tuple[tuple[str, nn.Parameter], ...]
    modules: tuple[nn.Module, ...]


def _call_root(root: nn.Module, paths: Sequence[str]) -> str:
    """The innermost module that contains all `paths` and is called, which containers are not."""
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

    unit_modules: modules to gather as one; a parameter belongs to the innermost one around it,
    or to the root unit. Within one module, parameters that differ in dtype, in sharding group or
    in being trained form units of their own (one flat buffer has one dtype); those of another
    group than "dense" hang on the innermost module that holds them all (a layer's experts).
    also_used_by: parameters that other modules use as well (tied weights): each is a unit of its
    own, whose layout is then the same on every pipeline stage that holds a copy.
    """
    also_used_by = also_used_by or {}
    path_of = {module: path for path, module in root.named_modules()}
    unit_paths = {path_of[module] for module in unit_modules}
    grouped: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    modules: dict[tuple, tuple[nn.Module, ...]] = {}
    for name, param in root.named_parameters():
        owner = name.rpartition(".")[0]
        if param in also_used_by:
            key = (name, "", torch.float32, True)
            modules[key] = (root.get_submodule(owner), *also_used_by[param])
        else:
            home = owner
            while home and home not in unit_paths:
                home = home.rpartition(".")[0]
            key = (home, group_key_of(param), param.dtype, param.requires_grad)
        grouped.setdefault(key, []).append((name, param))

    plans = []
    for key, params in grouped.items():
        home, group_key = key[0], group_key_of(params[0][1])
        name = home or "root"
        if key not in modules:
            path = home
            if group_key != "dense":
                path = _call_root(root, [n.rpartition(".")[0] for n, _ in params])
                name = path or "root"
            modules[key] = (root.get_submodule(path),)
        same_name = sum(plan.name == name for plan in plans)
        plans.append(
            UnitPlan(
                f"{name}#{same_name + 1}" if same_name else name,
                group_key,
                tuple(params),
                modules[key],
            )
        )
    return plans
