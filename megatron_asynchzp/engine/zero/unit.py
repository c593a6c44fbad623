# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one unit: parameters that are gathered and used together, and their buffers."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from megatron_asynchzp.engine.comm.block_formats import BlockFormat
from megatron_asynchzp.engine.comm.collectives import (
    AxisGroup,
    Steps,
    all_gather_steps,
    all_reduce_steps,
    completed,
    followed_by,
    holding,
    new_shards,
    reduce_scatter_steps,
    rounded_all_reduce_steps,
    rounded_reduce_scatter_steps,
)
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.low_precision_gather import LowPrecisionGather
from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.sharding.early_units import OuterTraffic
from megatron_asynchzp.engine.sharding.in_flight import (
    UnitInFlight,
    grads_before_added_nbytes,
    reduction_nbytes,
)
from megatron_asynchzp.engine.sharding.layout import FlatLayout, GradPiece
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.directions import Direction
from megatron_asynchzp.engine.zero.guard import ParamGuard
from megatron_asynchzp.engine.zero.marks import Marks
from megatron_asynchzp.engine.zero.sent_record import SentRecord
from megatron_asynchzp.errors import ConfigurationError


class IllegalTransition(RuntimeError):
    """Raised when an operation needs gathered parameters and they are sharded, or the reverse."""


class Fragment:
    """The part of a parameter in this rank's optimizer shard, or P shard if it is not trained."""

    grad: torch.Tensor  # if trained: its elements of main_grad, 1-D; see give_grad
    # If trained: the optimizer's parameter; it reads as NaN while `values` are on the host.
    param: torch.nn.Parameter

    def __init__(self, unit: "HZPUnit", index: int):
        self.unit, self.index = unit, index  # the unit, and the parameter's number in it
        self.name, self.shape = unit.param_names[index], unit.layout.slices[index].shape
        # Its row-major elements in the shard, and their values, 1-D: of main_param, if trained.
        source = unit.main_param if unit.is_trained else unit.model_param
        self.held, self.values = source.elements_of(index)
        if unit.is_trained:
            self.grad = unit.main_grad.sub_buffer(unit.optim_range).elements_of(index)[1]
            nan = torch.tensor(torch.nan, device=unit.device).expand(self.values.shape)
            self.param = torch.nn.Parameter(nan if unit.is_main_param_away else self.values)


class HZPUnit:
    """Parameters that are unsharded, used and resharded together (FSDP's parameter group).

        at rest             model_param  [P shard, model dtype]
                            main_grad    [G shard, fp32 or bf16: groups.main_grad_dtype]
                            main_param   [O shard, fp32], within the other two ranges
        while it computes   + full parameters [padded_numel, model dtype]
        in backward         + full gradients  [padded_numel, fp32]

    In an fp32 model main_param is a view of model_param. Untrained parameters have a model_param
    only. `params` are (name, parameter) in layout order, of a single dtype, all trained or none;
    `shard` is their P shard, 1-D, if they were sharded while the model was built (Construction).
    """

    # Whether the optimizer states are on the host between two updates (HostStates).
    is_on_host = False
    # Whether the last update has already cast main_param into the P shard.
    shard_is_current = False

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        groups: ShardGroups,
        shard: torch.Tensor | None = None,
        layer: str | None = None,
        is_seated: bool = False,
    ):
        self.name, self.is_seated = name, is_seated
        self.layer = name if layer is None else layer
        self.groups = groups
        self.param_names = [param_name for param_name, _ in params]
        self.params = [param for _, param in params]
        self.dtype = self.params[0].dtype
        self.device = self.params[0].device
        self.is_trained = self.params[0].requires_grad
        sizes = groups.topology.sizes
        # With a shard size of 1 parameters are never gathered, and gradients go straight into
        # main_grad.
        self.is_always_unsharded, self.reduces_in_place = sizes.param == 1, sizes.grad == 1
        self.layout = FlatLayout.build(
            [(param_name, tuple(param.shape)) for param_name, param in params], sizes.optim
        )
        # A string, because it caches its hash. Units with equal keys share memory in flight.
        self.size_key = f"{self.layout.padded_numel} x {self.dtype} by {groups.topology.sizes}"
        self.size_key += f" of {groups.topology.world_size}"
        # Equal for units whose parameters have the same shapes and offsets.
        self.views_key = str([(piece.shape, piece.range.start) for piece in self.layout.slices])
        self.overwrites_main_grads: bool | None = None  # None without fuse_grads
        # One, or one for forward and one for backward, which then read other codes; or none.
        self.code_gathers: list[LowPrecisionGather] = []
        self._full_param: torch.Tensor | None = None
        self.guard = ParamGuard(self.params)
        self._allocate_and_shard(shard)
        self.sent_record = SentRecord(self)

    def __str__(self) -> str:
        return self.name

    # ---- construction

    def _range(self, shard_size: int) -> Range:
        return self.groups.topology.shard_range(shard_size, self.layout.padded_numel)

    def _new_buffer(self, range_: Range, dtype: torch.dtype) -> FlatBuffer:
        storage = torch.zeros(range_.numel, dtype=dtype, device=self.device)
        return FlatBuffer(self.layout, range_, storage)

    def _allocate_and_shard(self, shard: torch.Tensor | None) -> None:
        sizes = self.groups.topology.sizes
        if shard is None:
            self.model_param = self._new_buffer(self._range(sizes.param), self.dtype)
            self.model_param.copy_params(self.params)
        else:
            self.model_param = FlatBuffer(self.layout, self._range(sizes.param), shard)
        self.optim_range = self._range(sizes.optim)
        self.marks = Marks(
            self.optim_range.numel, self.device, self.is_trained, not self.is_main_param_aliased
        )
        if self.is_trained:
            self.main_grad = self._new_buffer(self._range(sizes.grad), self.groups.main_grad_dtype)
            if self.is_main_param_aliased:
                self.main_param = self.model_param.sub_buffer(self.optim_range)
            else:
                self.main_param = self._new_buffer(self.optim_range, torch.float32)
                self.copy_model_to_main()
        self.placeholders = self._make_placeholders()
        if self.is_always_unsharded:
            self._full_param = self.model_param.storage
            self._point_params_at(self.model_param.param_views())
        else:
            self._point_params_at(self.placeholders)

    def _make_placeholders(self) -> list[torch.Tensor]:
        # An expanded NaN has the right shape for AccumulateGrad and parameter groups and takes no
        # memory, and computing with it gives NaN instead of a plausible number (law 5).
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nan = nan
        of_shape = {piece.shape: nan.expand(piece.shape) for piece in self.layout.slices}
        return [of_shape[piece.shape] for piece in self.layout.slices]

    def _point_params_at(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    @property
    def gathered_nbytes(self) -> int:
        return self.layout.padded_numel * self.dtype.itemsize

    @cached_property
    def outer_traffic(self) -> OuterTraffic:
        topology = self.groups.topology
        itemsizes = self.dtype.itemsize, self.groups.grad_dtype.itemsize
        numel, ranks = self.layout.padded_numel, topology.world_size
        return OuterTraffic.of(numel, *itemsizes, topology.sizes, ranks)

    @property
    def is_main_param_aliased(self) -> bool:
        return self.dtype == torch.float32

    @property
    def is_main_param_away(self) -> bool:
        return self.is_on_host and not self.is_main_param_aliased

    # ---- parameters

    @property
    def is_unsharded(self) -> bool:
        """Whether parameters are views of gathered memory, not placeholders that read as NaN."""
        return self._full_param is not None

    def unshard_steps(self, full: torch.Tensor) -> Steps:
        return all_gather_steps(self.model_param.storage, full, self.groups.unshard)

    def unshard_for_layers_steps(self, full: torch.Tensor, direction: Direction | None) -> Steps:
        """Gather the parameters into `full`, as codes if layers read them in `direction` alone."""
        if not self.code_gathers or (len(self.code_gathers) > 1 and direction is None):
            return self.unshard_steps(full)
        gather = self.code_gathers[-1 if direction is Direction.BACKWARD else 0]
        shard = self.model_param
        place = shard.range.start // shard.range.numel
        return gather.steps(shard.storage, place, full, self.groups.unshard)

    def gather_in_codes(
        self, names: Collection[str], forms: Sequence[BlockFormat], is_computing: Callable[[], bool]
    ) -> None:
        """Gather `names`, which layers read in one form, or one for each direction, as codes."""
        if self.dtype != torch.bfloat16 or self.is_always_unsharded:
            return
        numbers = [index for index, name in enumerate(self.param_names) if name in names]
        sizes = self.layout, self.groups.topology.sizes.param, numbers
        gathers = [LowPrecisionGather(*sizes, form, is_computing) for form in forms]
        self.code_gathers = gathers if all(gather.is_shorter for gather in gathers) else []

    def check_called_in_fp8(self) -> None:
        """Raise ConfigurationError if a layer outside FP8 is called and would read FP8 codes."""
        if self.code_gathers and not self.code_gathers[0].is_computing():
            raise ConfigurationError(
                f"{self.name} is called outside FP8 or FP4, but its weights are gathered as codes. "
                "Call it within, or drop --fp8-param-gather and --fp4-param-gather."
            )

    def views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        return FlatBuffer(self.layout, Range(0, self.layout.padded_numel), full).param_views()

    def to_unsharded(self, full: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters at `views`, which views_of(full) made of the gathered `full`."""
        if self.is_unsharded:
            raise IllegalTransition(f"{self.name}: its parameters are unsharded already")
        self._full_param = full
        self.guard.reveal()
        self._point_params_at(views)

    def reshard(self) -> None:
        """Drop the full parameters, unless they are sharded or always unsharded."""
        if self.is_always_unsharded or not self.is_unsharded:
            return
        self._point_params_at(self.placeholders)
        self._full_param = None
        self.guard.hide()

    @property
    def full_param_storage(self) -> torch.Tensor:
        """The gathered parameters, 1-D; raises IllegalTransition while they are sharded."""
        if self._full_param is None:
            raise IllegalTransition(f"{self.name}: its parameters are sharded")
        return self._full_param

    def is_gathered_at(self, pointer: int) -> bool:
        full = self._full_param
        return full is not None and full.untyped_storage().data_ptr() == pointer

    def params_at_rest(self) -> list[torch.Tensor]:
        return [self.model_param.storage, *self.placeholders]

    def states(self) -> list[torch.Tensor]:
        """Return the device tensors of a trained unit besides its parameters."""
        if not self.is_trained:
            return []
        own = [self.main_grad.storage, *self.marks.bits.values(), *self.sent_record.states()]
        return own if self.is_main_param_away else [self.main_param.storage, *own]

    # ---- gradients

    @cached_property
    def whole_grads(self) -> list[torch.Tensor]:
        """Views of main_grad for each gradient, if the G shard is the whole."""
        return self.main_grad.param_views()

    def fuse_grads(self, overwrites: bool) -> None:
        """Let layers put the gradients of their weights where they are collected.

        [Note: fused gradients] As with Megatron's DDP, a layer of Transformer Engine adds its
        gradient to `param.main_grad` (point_at_places) in backward, sets `grad_added_to_main_grad`
        and gives autograd a dummy. With `overwrite_main_grad`, which layers read in forward, it
        overwrites.
        """
        if self.overwrites_main_grads is not overwrites:
            self.overwrites_main_grads = overwrites
            params: list[Any] = self.params
            for param in params:
                param.grad_added_to_main_grad, param.overwrite_main_grad = False, overwrites

    def in_flight(self, slot_nbytes: int) -> UnitInFlight:
        need = UnitInFlight.of(
            self.layer,
            self.layout.padded_numel,
            self.dtype.itemsize,
            self.is_trained,
            self.groups.topology,
            slot_nbytes,
            self.groups.grad_dtype.itemsize,
        )
        need = replace(need, is_seated=self.is_seated and need.params > 0)
        if self.reduces_in_place and self.is_trained:
            sizes = Counter(param.numel() * param.dtype.itemsize for param in self.params)
            need = replace(need, own_grads=grads_before_added_nbytes(sizes))
        return need

    def reduction_nbytes(self, piece: GradPiece) -> int:
        sizes = [axis_group.axis.size for axis_group in self.groups.grad_reduce]
        return reduction_nbytes(piece.numel, sizes, self.groups.grad_dtype.itemsize)

    def reduce_steps(
        self, full: torch.Tensor, shards: Sequence[torch.Tensor], own: torch.Tensor
    ) -> Steps:
        """Reduce-scatter a piece of the gradients over the G axes in fp32 and add it to `own`.

        `shards` is memory for it (new_shards). A rank without gradients contributes zeros, so all
        ranks issue the same collectives.
        """
        last = yield from _reduce_scatter_steps(
            full, self.groups.grad_reduce, shards, self.groups.grad_dtype
        )
        return followed_by(last, lambda: own.add_(shards[-1]))

    def sync_grad_steps(self, scale: float) -> Steps:
        """Sum the gradients over the axes from G to O and over the replicas, once per step.

        Then the O range of main_grad holds the sum times `scale`, and the rest is meaningless until
        `zero_grads`. Temporary memory is allocated on the stream that runs this.
        """
        shard, groups = self.main_grad.storage, self.groups
        last, shards = None, list[torch.Tensor]()
        if groups.grad_sync:
            shards = new_shards(shard, groups.grad_sync, groups.grad_dtype)
            reduction = _reduce_scatter_steps(shard, groups.grad_sync, shards, groups.grad_dtype)
            last = yield from completed(reduction) if groups.replica_sync else reduction
            shard = shards[-1]
        if groups.replica_sync:
            if groups.grad_dtype == torch.float32:
                last = yield from all_reduce_steps(shard, groups.replica_sync)
            else:
                last = yield from rounded_all_reduce_steps(
                    shard, groups.replica_sync, groups.grad_dtype
                )
        own = self.main_grad.view(self.optim_range)

        def end() -> None:
            shard.mul_(scale)
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)

        return followed_by(holding(last, *shards), end)

    def reopen_grads(self, scale: float) -> None:
        """Undo sync_grad_steps(scale): the sum becomes replica 0's gradients, others' are 0."""
        own = self.main_grad.view(self.optim_range)
        total = own / scale
        self.main_grad.storage.zero_()
        if self.groups.topology.replica_index == 0:
            own.copy_(total)

    def zero_grads(self) -> None:
        params: list[Any] = self.params
        with self.guard.without_torch_function():
            for param in params:
                param.grad = None
                if self.overwrites_main_grads is not None:
                    param.grad_added_to_main_grad = False
        if self.is_trained:
            self.main_grad.storage.zero_()

    def main_grad_fragments(self) -> list[torch.Tensor]:
        return self.main_grad.sub_buffer(self.optim_range).fragment_views()

    def main_param_fragments(self) -> list[torch.Tensor]:
        return self.main_param.fragment_views()

    def new_fragments(self) -> list[Fragment]:
        return [Fragment(self, index) for index in range(len(self.params))]

    def hold_on_host(self, memory: torch.Tensor) -> None:
        self.is_on_host = True
        if not self.is_main_param_aliased:
            memory.copy_(self.main_param.storage)
            self.main_param = FlatBuffer(self.layout, self.optim_range, memory)

    @property
    def is_first_replica(self) -> bool:
        """Whether sums over all ranks take the O range from this rank, not from a replica."""
        return self.groups.topology.replica_index == 0

    # ---- after the optimizer

    @torch.no_grad()
    def copy_model_to_main(self) -> None:
        """Set main_param to the values of model_param, after the model was loaded."""
        if self.is_trained and not self.is_main_param_aliased:
            self.main_param.storage.copy_(self.model_param.view(self.optim_range))

    def cast_main_param(self, values: torch.Tensor) -> None:
        """Cast `values` of main_param into this rank's O range of the P shard."""
        self.marks.write(values, self.model_param.view(self.optim_range))

    def sync_param_steps(self) -> Steps:
        """Cast main_param to the model dtype and gather it into the P shard, once per step."""
        if not (self.is_main_param_aliased or self.shard_is_current):
            self.cast_main_param(self.main_param.storage.to(self.device))
        self.shard_is_current = False
        if self.sent_record.is_watched:
            self.sent_record.note_sent()
        return (yield from self.complete_param_steps())

    def preview_param_steps(self, update: Callable[[torch.Tensor], None]) -> Steps:
        """Update a copy of main_param, and gather it into the P shard."""
        if self.is_main_param_aliased:
            return (yield from self._preview_beside_steps(update))
        copy = self.main_param.storage.clone()
        update(copy)
        self.marks.write(copy, self.model_param.view(self.optim_range))
        self.sent_record.note_sent()
        return (yield from self.complete_param_steps())

    def _preview_beside_steps(self, update: Callable[[torch.Tensor], None]) -> Steps:
        """Do that without a write to this rank's range of the P shard, because it is main_param."""
        own = self.optim_range.within(self.model_param.range)
        gathered = torch.empty_like(self.model_param.storage)
        copy = gathered[own.start : own.stop].copy_(self.main_param.storage)
        update(copy)
        self.sent_record.note_sent(copy)
        last = yield from all_gather_steps(copy, gathered, self.groups.param_sync)

        def copy_other_ranges() -> None:
            for part in (slice(own.start), slice(own.stop, None)):
                self.model_param.storage[part].copy_(gathered[part])

        return followed_by(last, copy_other_ranges)

    def complete_param_steps(self) -> Steps:
        own = self.model_param.view(self.optim_range)
        return all_gather_steps(own, self.model_param.storage, self.groups.param_sync)

    def state_nbytes(self) -> dict[str, int]:
        """Return the bytes at rest on the device, by state; an aliased main_param counts as 0."""
        trained = self.is_trained
        return {
            "model_param": self.model_param.nbytes,
            "main_grad": self.main_grad.nbytes if trained else 0,
            "main_param": self.main_param.nbytes
            if trained and not (self.is_main_param_aliased or self.is_main_param_away)
            else 0,
        }


def _reduce_scatter_steps(
    full: torch.Tensor,
    axes: Sequence[AxisGroup],
    shards: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> Steps:
    is_rounded = dtype != torch.float32
    return (rounded_reduce_scatter_steps if is_rounded else reduce_scatter_steps)(
        full, axes, shards
    )
