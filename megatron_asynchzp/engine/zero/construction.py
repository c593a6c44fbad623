# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the parameters of a model under construction, while each rank keeps its part."""

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.comm.collectives import all_gather_steps, run_steps
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.device import return_freed_memory
from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.sharding.layout import FlatLayout, ParamSlice
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.guard import GRAD, Use, new_guarded_class
from megatron_asynchzp.engine.zero.plan import UnitPlan
from megatron_asynchzp.engine.zero.unit import HZPUnit

OTHER_UNITS = "its parameters are divided into other units than when it was built"


@dataclass
class _HeldParam:
    param: nn.Parameter
    kind: type  # its class before
    piece: ParamSlice
    values: torch.Tensor  # 1-D, its elements in this rank's shard


class _Sharded:
    """Parameters of a module that will form one unit: laid out, cut, and replaced by NaN."""

    def __init__(
        self, params: Sequence[tuple[str, nn.Parameter]], groups: ShardGroups, group_key: str
    ):
        self.group_key = group_key
        self.groups = groups
        sizes = groups.topology.sizes
        shapes = [(f"{i}", tuple(param.shape)) for i, (_, param) in enumerate(params)]
        self.layout = FlatLayout.build(shapes, sizes.optim)
        self.range = groups.topology.shard_range(sizes.param, self.layout.padded_numel)
        self.parts = [
            _HeldParam(param, type(param), piece, self._cut(param, piece))
            for (_, param), piece in zip(params, self.layout.slices, strict=True)
        ]

    def _held(self, piece: ParamSlice) -> Range:
        held = piece.range.intersect(self.range)
        return held.within(piece.range) if held.numel else Range(0, 0)

    def _cut(self, param: nn.Parameter, piece: ParamSlice) -> torch.Tensor:
        held = self._held(piece)
        return param.detach().reshape(-1)[held.start : held.stop].clone()

    def cut_again(self) -> None:
        for part in self.parts:
            part.values = self._cut(part.param, part.piece)

    @property
    def params(self) -> list[nn.Parameter]:
        return [part.param for part in self.parts]

    def new_shard(
        self, parts: Sequence[_HeldParam], device: torch.device | None = None
    ) -> torch.Tensor:
        values = parts[0].values
        storage = torch.zeros(self.range.numel, dtype=values.dtype, device=device or values.device)
        buffer = FlatBuffer(self.layout, self.range, storage)
        for part in parts:
            held = part.piece.range.intersect(self.range)
            if held.numel:
                buffer.view(held).copy_(part.values)
        return storage

    def gather(self, device: torch.device | None, lasts: bool) -> None:
        """Make the parameters whole; with `lasts` each has a storage of its own, as before."""
        for dtype in dict.fromkeys(part.values.dtype for part in self.parts):
            parts = [part for part in self.parts if part.values.dtype == dtype]
            shard = self.new_shard(parts, device)
            for part in parts:
                part.values = part.values.new_empty(0)
            full = shard.new_empty(self.layout.padded_numel)
            run_steps(all_gather_steps(shard, full, self.groups.unshard))
            for part in parts:
                own = full[part.piece.range.start : part.piece.range.stop].view(part.piece.shape)
                part.param.__class__ = part.kind
                part.param.data = own.to(part.values.device, copy=lasts)


class Construction:
    """A model that is being built, module by module, on every rank of its sharding groups.

        module built      its parameters are whole
        shard(module)     this rank's part is cut out; each parameter is an expanded NaN
        module.bfloat16() or any other conversion happens to the parts
        a weight is used  its unit is gathered and stays whole       (collective)
                          or, with `reshards`, until a weight of another unit is used
        take(plan)        the part becomes the shard of a unit

    This changes no value and draws no random number: the weights are those of the model built
    whole.
    """

    def __init__(
        self,
        groups: Mapping[str, ShardGroups],  # by group key
        group_key_of: Callable[[nn.Parameter], str] = lambda _: "dense",  # as in plan_units
        device: torch.device | None = None,  # of collectives, if not that of the parameters
        # Called with each whole parameter before it is cut.
        prepare: Callable[[nn.Parameter], object] | None = None,
        # Cut a unit again, with the values that all ranks wrote, once another one is used.
        reshards: bool = False,
    ):
        self.groups = groups
        self.peak_whole_nbytes = 0  # the most bytes of parameters that were whole at once
        self._group_key_of, self._device, self._prepare = group_key_of, device, prepare
        self._sharded: dict[nn.Parameter, _Sharded] = {}
        self._readers: dict[nn.Parameter, str] = {}
        self._classes: dict[type, type] = {}
        self._modules: dict[nn.Module, list[_Sharded]] = {}
        self._reshards = reshards
        self._open: list[_Sharded] = []  # those to be cut again

    def __deepcopy__(self, _memo: object) -> "Construction":
        return self  # of a module of it that is copied, as adapters do

    # ---- a module is complete

    @torch.no_grad()
    def shard(self, module: nn.Module, alone: Collection[nn.Parameter] = ()) -> None:
        """Keep only this rank's part of the parameters of `module`, which is complete.

        Those in `alone` become units of their own (tied weights). Tensors that are not plain, or
        not sharded by their group, stay whole.
        """
        self.note_whole(module.parameters())
        grouped: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, param in module.named_parameters():
            if self._can_shard(param):
                key = (self._group_key_of(param), param.requires_grad, param in alone and name)
                grouped.setdefault(key, []).append((name, param))
        for (group_key, *_), params in grouped.items():
            if self._prepare is not None:
                for _, param in params:
                    self._prepare(param)
            sharded = _Sharded(params, self.groups[str(group_key)], str(group_key))
            self._modules.setdefault(module, []).append(sharded)
            module._apply = partial(self._convert, module)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
            for part in sharded.parts:
                self._sharded[part.param] = sharded
                self._hide(part, part.values.new_full((), float("nan")))
            # The freed whole parameters lie between parts that stay. Without this call the process
            # would keep the memory of the whole model.
            return_freed_memory(sharded.parts[0].values.device)

    def _can_shard(self, param: nn.Parameter) -> bool:
        if param in self._sharded or param in self._readers:
            return False
        groups = self.groups.get(self._group_key_of(param))
        is_plain = type(param.data) is torch.Tensor and param.layout == torch.strided
        is_split = groups is not None and groups.topology.sizes.param > 1
        return is_split and is_plain and param.is_floating_point() and not param.is_meta

    def note_whole(self, params: Iterable[nn.Parameter]) -> None:
        """Note that `params` are complete: those that are not sharded are whole now."""
        whole = {*(param for param in params if param not in self._sharded), *self._readers}
        nbytes = sum(param.numel() * param.dtype.itemsize for param in whole)
        self.peak_whole_nbytes = max(self.peak_whole_nbytes, nbytes)

    def _hide(self, part: _HeldParam, element: torch.Tensor) -> None:
        """Let the parameter be `element`, expanded, and notice its use."""
        part.param.data = element.detach().expand(part.piece.shape)
        if part.kind not in self._classes:
            self._classes[part.kind] = new_guarded_class(part.kind, self._answer)
        part.param.__class__ = self._classes[part.kind]

    # ---- conversions and uses before modules become units

    def _convert(
        self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        """Convert the parts too, in place of `module._apply` (bfloat16(), cuda(), ...)."""
        if module not in self._modules:  # a copy of a module, which has whole parameters
            return type(module)._apply(module, fn, recurse)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        self.reshard()
        parts = [part for sharded in self._modules[module] for part in sharded.parts]
        # The present names: adapters may have wrapped complete layers since.
        names = {param: name for name, param in module.named_parameters()}
        for part in parts:
            part.values = fn(part.values)
            part.param.__class__ = part.kind
            part.param.data = part.param.data.new_full((), float("nan"))
        type(module)._apply(module, fn, recurse)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        for part in parts:
            sharded = self._sharded.pop(part.param)
            if part.param in names:
                part.param = module.get_parameter(names[part.param])  # torch may have made another
            self._sharded[part.param] = sharded
            self._hide(part, part.param.data)
        return module

    def _answer(self, use: Use, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the parameters whole that `use` reads or writes, and call it."""
        leaves = tree_leaves((args, kwargs)) if use != GRAD else ()
        params = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        if any(param in self._sharded for param in params):
            self.reshard(except_of=params)
        for param in params:
            if param in self._sharded:
                self._unshard(self._sharded[param], f"{_caller()} uses its weights")
        return use(*args, **kwargs)

    @torch.no_grad()
    def reshard(self, except_of: Collection[nn.Parameter] = ()) -> None:
        """Cut the units that were gathered for a use, but those of `except_of`."""
        for sharded in self._open:
            if not any(param is kept for param in sharded.params for kept in except_of):
                sharded.cut_again()
                for part in sharded.parts:
                    del self._readers[part.param]
                    self._sharded[part.param] = sharded
                    self._hide(part, part.values.new_full((), float("nan")))
        self._open = [sharded for sharded in self._open if sharded.params[0] in self._readers]

    @torch.no_grad()
    def _unshard(self, sharded: _Sharded, reason: str) -> None:
        is_cut_again = self._reshards and reason != OTHER_UNITS
        sharded.gather(self._device, lasts=not is_cut_again)
        for param in sharded.params:
            del self._sharded[param]
            self._readers[param] = reason
        if is_cut_again:
            self._open.append(sharded)
        else:
            sharded.parts = []
        self.note_whole(())

    # ---- the model is complete

    def holds(self, param: nn.Parameter) -> bool:
        return param in self._sharded

    def take(self, plan: UnitPlan) -> torch.Tensor | None:
        """Return this rank's shard of the unit, 1-D, and leave placeholders; None if it is whole.

        Parameters of other units are gathered first. Collective: all ranks plan the same units.
        """
        params = [param for _, param in plan.params]
        candidates = list(dict.fromkeys(self._sharded[p] for p in params if p in self._sharded))
        fits = (
            len(candidates) == 1
            and candidates[0].group_key == plan.group_key
            and [id(param) for param in candidates[0].params] == [id(param) for param in params]
            and len({part.values.dtype for part in candidates[0].parts}) == 1
        )
        if not fits:
            for sharded in candidates:
                self._unshard(sharded, OTHER_UNITS)
            return None
        shard = candidates[0].new_shard(candidates[0].parts)
        for part in candidates[0].parts:
            part.param.__class__ = part.kind
            del self._sharded[part.param]
        candidates[0].parts = []
        return shard

    def close(self) -> None:
        """Gather all parameters that no unit took, and restore the modules. Collective."""
        for sharded in dict.fromkeys(self._sharded.values()):
            self._unshard(sharded, OTHER_UNITS)
        for module in self._modules:
            del module._apply  # pyright: ignore[reportPrivateUsage]
        self._modules.clear()

    def describe_whole(self, units: Sequence[HZPUnit]) -> list[str]:
        """Return a line for each reason why some of `units` stayed whole, with their bytes."""
        units_of: dict[str, list[HZPUnit]] = {}
        for unit in units:
            reason = next((self._readers[p] for p in unit.params if p in self._readers), None)
            if reason is not None:
                units_of.setdefault(reason, []).append(unit)
        return [_describe(reason, stayed) for reason, stayed in units_of.items()]


def _describe(reason: str, units: Sequence[HZPUnit]) -> str:
    nbytes = sum(unit.layout.numel * unit.dtype.itemsize for unit in units)
    names = units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}"
    count = "1 unit" if len(units) == 1 else f"{len(units)} units"
    return (
        f"{count} ({names}) stayed whole until the model was complete, {nbytes / 2**20:,.1f} MiB "
        f"on each rank: {reason}"
    )


# ---- the user of a parameter


def _caller() -> str:
    excluded = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(excluded):
            return f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
    return "something"
