# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Names a model chunk's shards in Megatron's checkpoint format.

[Note: shards as boxes of Megatron's tensors]
A checkpoint holds whole tensors with the model's own names and shapes, whatever its sharding. A
rank owns a run of elements of a flat buffer, hence a run of each parameter. Cut into boxes (at most
three for a matrix) torch.distributed.checkpoint saves and loads it natively, without a gather: a
rank writes its own elements (in a large world its neighbours' too, see save_ranks.py) and reads
them in place, and any other sharding, AsyncHZP's or Megatron's, finds them by their offsets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import unwrap_model

from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.sharding.layout import cut_into_boxes
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.operation import is_shared_load
from megatron_asynchzp.mcore.checkpoint.save_ranks import (
    Held,
    States,
    broadcast_to_replicas,
    held_part,
    is_read_here,
    runs_to_write,
)

SHARDS_KEY = "asynchzp_shards"
"""Where the shards are in the state dict of a model chunk or an optimizer, in place of tensors."""
FROZEN_KEY = "asynchzp_frozen_shards"
"""Where those of parameters are that are not trained."""


@dataclass(frozen=True)
class StoredRun:
    """A run of a parameter's elements that lies in one box of a stored tensor.

    Most parameters are one; Megatron stores the two halves of a gated MLP apart, so that each can
    be split anew over tensor-parallel ranks. entry has key, shape and offset without data; start is
    the first element within the parameter.
    """

    entry: ShardedTensor
    start: int

    def shards(
        self, values: torch.Tensor, held: Range, replica: int, prefix: str = ""
    ) -> Iterator[ShardedTensor]:
        """Return entries, sharing memory, for the part of this run in `values` (1-D).

        values are the elements `held` of the parameter; replica is 0 on the rank that writes them;
        prefix precedes the key.
        """
        own = Range(self.start, self.start + prod(self.entry.local_shape))
        part = held.intersect(own)
        leading = self.entry.prepend_axis_num  # a layer's index is no dim of its parameter
        inside = part.within(own) if part.numel else Range(0, 0)
        for box in cut_into_boxes(self.entry.local_shape, inside):
            start = own.start + box.range.start - held.start
            shape = (1,) * leading + box.shape
            offset = (0,) * leading + box.offset
            yield replace(
                self.entry,
                key=prefix + self.entry.key,
                data=values[start : start + box.range.numel].view(shape),
                dtype=values.dtype,
                local_shape=shape,
                global_offset=tuple(
                    a + b for a, b in zip(self.entry.global_offset, offset, strict=True)
                ),
                axis_fragmentations=None,  # not a regular grid
                prepend_axis_num=0,
                replica_id=(*self.entry.replica_id[:2], replica),  # pyright: ignore[reportIndexIssue]
            )


def find_stored_runs(
    entry: ShardedTensor | ShardedTensorFactory, param: torch.Tensor
) -> list[StoredRun]:
    """Return the stored runs of `param`, from the model's entry for it.

    Factories run on the meta device: they cut the parameter into views, whose strides and offsets
    give their places. Raises ConfigurationError for a factory that computes something else.
    """
    whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if isinstance(entry, ShardedTensorFactory):
        built = entry.build_fn(entry.key, whole, entry.replica_id, entry.flattened_range)
        entries = list(nested_values(built))
    else:
        entries = [replace(entry, data=whole)]
    views: list[Any] = [part.data for part in entries]
    is_view = all(view is whole or view._base is whole for view in views)
    if not is_view or sum(view.numel() for view in views) != param.numel():
        raise ConfigurationError(f"{entry.key} is stored in a form that cannot be sharded")
    cut = (_contiguous_pieces(part, view, ()) for part, view in zip(entries, views, strict=True))
    return [piece for pieces in cut for piece in pieces]


def _contiguous_pieces(
    entry: ShardedTensor, view: torch.Tensor, offset: tuple[int, ...]
) -> Iterator[StoredRun]:
    """Split a strided view along its leading dims until each part is one run of elements."""
    if view.is_contiguous():
        shape = (1,) * len(offset) + tuple(view.shape)
        leading = (0,) * entry.prepend_axis_num
        inner = offset + (0,) * view.dim()
        global_offset = tuple(
            a + b for a, b in zip(entry.global_offset, leading + inner, strict=True)
        )
        moved = replace(
            entry,
            data=None,
            local_shape=shape,
            global_offset=global_offset,
            axis_fragmentations=None,
        )
        yield StoredRun(moved, int(view.storage_offset()))
        return
    for index in range(view.shape[0]):
        yield from _contiguous_pieces(entry, view[index], (*offset, index))


class ChunkCheckpoint:
    """The part of a checkpoint that a model chunk writes and reads.

    It replaces the chunk's own `sharded_state_dict`, because Megatron asks the unwrapped model,
    whose parameters are placeholders. With snapshots it hands out copies, for writers that work
    during training and copy nothing.
    """

    def __init__(self, runtime: HZPRuntime, module: torch.nn.Module, snapshots: bool = False):
        self._runtime = runtime
        self._snapshots = snapshots
        self._model: Any = unwrap_model(module)
        self._describe, self._load = self._model.sharded_state_dict, self._model.load_state_dict
        self._model.sharded_state_dict = self.sharded_state_dict
        self._pieces: dict[torch.nn.Parameter, list[list[StoredRun]]] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        # The name of the parameter of each shard of the last sharded_state_dict, by its key there.
        self.names: dict[str, dict[str, str]] = {}
        self._is_spread = False

    # ---- what there is

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's own, with this rank's shards in place of its parameters.

        Waits for all operations in flight. Arguments as for the model's.
        """
        if not self._runtime.is_asleep:
            self._runtime.settle()
        self._pieces, rest = self._stored_runs(*args, **kwargs)
        self._is_spread = is_shared_load()
        state: dict[str, Any] = rest
        names = {id(param): name for name, param in self._model.named_parameters()}
        for key, is_trained in ((SHARDS_KEY, True), (FROZEN_KEY, False)):
            pairs = list(self._model_shards(is_trained))
            shards = [shard for _, shard in pairs]
            self._asked[key] = {str(i): shard.data for i, shard in enumerate(shards)}
            self.names[key] = {str(i): names[id(param)] for i, (param, _) in enumerate(pairs)}
            state |= self.as_state(shards, key)
        return state

    def stored_runs(self) -> dict[torch.nn.Parameter, list[list[StoredRun]]]:
        """Return the stored runs of each parameter, by each of its names.

        Raises ConfigurationError for a parameter that cannot be stored.
        """
        return self._stored_runs()[0]

    def _stored_runs(
        self, *args: Any, **kwargs: Any
    ) -> tuple[dict[torch.nn.Parameter, list[list[StoredRun]]], dict[str, Any]]:
        """Return stored_runs(), and the rest of the model's sharded_state_dict."""
        params = {id(param): param for unit in self._runtime.units for param in unit.params}
        entries, rest = extract_matching_values(
            self._describe(*args, **kwargs),
            lambda entry: isinstance(entry, ShardedBase) and id(entry.data) in params,
        )
        runs: dict[torch.nn.Parameter, list[list[StoredRun]]] = {
            param: [] for param in params.values()
        }
        # A framework may give the same entry under several keys, as those of adapters.
        own = {
            (id(e.data), e.key, getattr(e, "global_offset", 0)): e for e in nested_values(entries)
        }
        for entry in own.values():
            param = params[id(entry.data)]
            runs[param].append(find_stored_runs(entry, param))
        for unit in self._runtime.units:
            for name, param in zip(unit.param_names, unit.params, strict=True):
                if not runs[param]:
                    # Its placeholder would be saved in its place.
                    raise ConfigurationError(
                        f"{name}: the model does not define how this parameter is stored in a "
                        "checkpoint (its sharded_state_dict has no entry for it)"
                    )
        return runs, rest  # pyright: ignore[reportReturnType]

    def _model_shards(self, is_trained: bool) -> Iterator[tuple[torch.nn.Parameter, ShardedTensor]]:
        states: dict[HZPUnit, States] = {}
        for unit in self._runtime.units:
            if unit.is_trained == is_trained and is_read_here(unit):
                shard = unit.model_param
                held = FlatBuffer(unit.layout, shard.range, self.current_values(shard.storage))
                views = held.sub_buffer(unit.optim_range).fragment_views()
                states[unit] = {"": [held_part(unit, *pair) for pair in enumerate(views)]}
        for unit, _, held in runs_to_write(states):
            for shard in self.shards_of(unit, held):
                yield unit.params[held.index], shard

    def current_values(self, values: torch.Tensor) -> torch.Tensor:
        return self._runtime.current_values(values)

    @property
    def units(self) -> Sequence[HZPUnit]:
        return self._runtime.units

    def shards_of(self, unit: HZPUnit, held: Held, prefix: str = "") -> Iterator[ShardedTensor]:
        whole = unit.layout.slices[held.index].range
        part = held.part.within(whole) if held.part.numel else Range(0, 0)
        for copy in self._pieces[unit.params[held.index]]:
            for run in copy:
                yield from run.shards(held.values, part, held.replica, prefix)

    def as_state(self, shards: Sequence[ShardedTensor], key: str = SHARDS_KEY) -> dict[str, Any]:
        own = torch.clone if self._snapshots else _with_own_storage
        shards = [replace(shard, data=own(shard.data)) for shard in shards]  # pyright: ignore[reportArgumentType]
        return {key: {str(i): shard for i, shard in enumerate(shards)}} if shards else {}

    # ---- what was read

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load the entries of the last `sharded_state_dict`. Collective over the sharding groups.

        Returns missing keys, of this rank's shards, and unexpected ones: those parameters keep
        their values. With `strict` raises ConfigurationError instead.
        """
        self._runtime.check_awake()
        rest, lacking = dict(state_dict), dict[str, None]()
        for key, asked in self._asked.items():
            loaded = rest.pop(key, {})
            absent = () if strict else asked.keys() - loaded.keys()
            lacking |= dict.fromkeys(self.names[key][index] for index in asked if index in absent)
            fill({index: asked[index] for index in asked if index not in absent}, loaded)
        self._asked = {}
        if self._is_spread:
            for unit in self._runtime.units:
                broadcast_to_replicas(unit, [unit.model_param.view(unit.optim_range)])
        missing, unexpected = self._load_rest(rest, strict)
        self._runtime.complete_params()
        return [*lacking, *missing], unexpected

    def _load_rest(self, state_dict: dict[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        own = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        missing, unexpected = self._load(state_dict, strict=False)
        # Transformer Engine's extra states come and go with its versions; Megatron lets them.
        missing = [n for n in missing if n not in own and not n.endswith("_extra_state")]
        unexpected = [name for name in unexpected if not name.endswith("_extra_state")]
        if strict and (missing or unexpected):
            fault = (
                f"lacks {missing[0]}" if missing else f"has {unexpected[0]}, which is no part of"
            )
            raise ConfigurationError(f"the checkpoint {fault} the model")
        return missing, unexpected


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage ends with it."""
    # Megatron's writer copies a host tensor of a larger storage, because torch would write all of
    # it.
    return torch.from_dlpack(view.detach()) if view.device.type == "cpu" else view


@torch.no_grad()
def fill(asked: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    if lacking := len(asked.keys() - loaded.keys()):
        raise ConfigurationError(
            f"the checkpoint lacks {lacking} of {len(asked)} shards; loading a part is not "
            "possible with --use-asynchzp (--dist-ckpt-strictness)"
        )
    for key, target in asked.items():
        if loaded[key].data_ptr() != target.data_ptr():
            target.copy_(loaded[key].view(target.shape))
