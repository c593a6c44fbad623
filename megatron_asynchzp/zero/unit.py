# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one unit: parameters that are gathered, used and released together, and the three
persistent buffers of their states.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from megatron_asynchzp.comm.collectives import (
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
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.low_precision_gather import Fp8Gather, WeightGrid
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharding.backward_room import OuterTraffic
from megatron_asynchzp.sharding.buffer import FlatBuffer
from megatron_asynchzp.sharding.in_flight import (
    UnitInFlight,
    grads_before_added_nbytes,
    reduction_nbytes,
)
from megatron_asynchzp.sharding.layout import FlatLayout
from megatron_asynchzp.sharding.pieces import GradPiece
from megatron_asynchzp.sharding.topology import Range
from megatron_asynchzp.zero.guard import ParamGuard
from megatron_asynchzp.zero.marks import Marks
from megatron_asynchzp.zero.sent_record import SentRecord


class IllegalTransition(RuntimeError):
    """The full parameters are, or are not, in memory, which what was requested does not allow."""


class Fragment:
    """The part of one parameter, number `index` of its unit, in this rank's optimizer shard.

    held: which of its row-major elements; values: these of main_param, 1-D fp32; param: as a
    parameter of an optimizer, NaN where `values` are on the host; grad: their place in main_grad,
    1-D, not given to it yet (give_grad).
    """

    def __init__(
        self, index: int, held: Range, values: torch.Tensor, grad: torch.Tensor, is_away: bool
    ):
        self.index, self.held, self.values, self.grad = index, held, values, grad
        nan = torch.tensor(torch.nan, device=grad.device)
        self.param = torch.nn.Parameter(nan.expand(values.shape) if is_away else values)


class HZPUnit:
    """One gathered-and-released set of parameters (FSDP's unit, Megatron's buckets' place).

        at rest             model_param  [P shard, model dtype]
                            main_grad    [G shard, fp32, or bf16 where groups have it so]
                            main_param   [O shard, fp32], within the other two ranges
        while it computes   + full parameters [padded_numel, model dtype]
        in backward         + full gradients  [padded_numel, fp32]

    Where the model itself is fp32, main_param is a view of model_param: nothing is stored twice.
    Parameters that are not trained have a model_param only.

    name: for messages; params: (name, parameter) in layout order, all of one dtype and either
    all trained or none; groups: communicators of the sharding group of this unit; shard: the P
    shard, 1-D, where the parameters were sharded while the model was built (Construction); layer,
    part, is_seated: see UnitPlan, a layer of its own where None.

    size_key: equal for units that fit the same memory in flight.
    views_key: equal for those whose parameters lie at the same places.
    overwrites_main_grads: see fuse_grads, None without it.
    marks: what changed since when.
    fp8_gather: how the parameters travel to layers that compute in FP8, see `gather_in_fp8`.
    sent_record: of what was sent of it.
    is_on_host: whether its optimizer states are on the host between two updates (HostStates), and
        is_cast, whether the parameter shard holds what the last one made of main_param.
    """

    is_on_host = False
    is_cast = False

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
        # A shard of size 1 is the whole: such parameters are never gathered, and such gradients
        # go straight into main_grad.
        self.is_always_unsharded, self.reduces_in_place = sizes.param == 1, sizes.grad == 1
        self.layout = FlatLayout.build(
            [(param_name, tuple(param.shape)) for param_name, param in params], sizes.optim
        )
        # Strings: they remember their hash.
        self.size_key = f"{self.layout.padded_numel} x {self.dtype} by {groups.topology.sizes}"
        self.size_key += f" of {groups.topology.world_size}"
        self.views_key = str([(piece.shape, piece.range.start) for piece in self.layout.slices])
        self.overwrites_main_grads: bool | None = None
        self.fp8_gather: Fp8Gather | None = None
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
        # One NaN, expanded: the right shape for AccumulateGrad and for parameter groups, no memory,
        # and computing with it gives NaN instead of a plausible number (law 5).
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nan = nan
        of_shape = {piece.shape: nan.expand(piece.shape) for piece in self.layout.slices}
        return [of_shape[piece.shape] for piece in self.layout.slices]

    def _point_params_at(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its full parameters."""
        return self.layout.padded_numel * self.dtype.itemsize

    @cached_property
    def outer_traffic(self) -> OuterTraffic:
        """Traffic of a step, in bytes."""
        topology = self.groups.topology
        itemsizes = self.dtype.itemsize, self.groups.grad_dtype.itemsize
        numel, ranks = self.layout.padded_numel, topology.world_size
        return OuterTraffic.of(numel, *itemsizes, topology.sizes, ranks)

    @property
    def is_main_param_aliased(self) -> bool:
        """Whether main_param is a view of model_param (fp32 models)."""
        return self.dtype == torch.float32

    @property
    def is_main_param_away(self) -> bool:
        """Whether main_param is on the host between two updates."""
        return self.is_on_host and not self.is_main_param_aliased

    # ---- parameters

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters are in memory, and every parameter is a view of them.
        Otherwise each is a placeholder that reads as NaN."""
        return self._full_param is not None

    def gather_steps(self, full: torch.Tensor) -> Steps:
        """Gather the full parameters over the P axes into `full` (1-D, padded_numel)."""
        return all_gather_steps(self.model_param.storage, full, self.groups.unshard)

    def gather_for_layers_steps(self, full: torch.Tensor) -> Steps:
        """gather_steps, by which layers that compute in FP8 get what they would make of it."""
        if self.fp8_gather is None:
            return self.gather_steps(full)
        shard = self.model_param
        place = shard.range.start // shard.range.numel
        return self.fp8_gather.steps(shard.storage, place, full, self.groups.unshard)

    def gather_in_fp8(
        self, names: Collection[str], grid: WeightGrid, is_computing: Callable[[], bool]
    ) -> None:
        """From here on let the parameters `names`, which layers read in FP8 on `grid` alone, travel
        to them as codes, where less travels then. is_computing: see Fp8Gather."""
        if self.dtype != torch.bfloat16 or self.is_always_unsharded:
            return
        numbers = [index for index, name in enumerate(self.param_names) if name in names]
        shards = self.groups.topology.sizes.param
        gather = Fp8Gather(self.layout, shards, numbers, grid, is_computing)
        self.fp8_gather = gather if gather.is_shorter else None

    def refuse_other_grid(self) -> None:
        """Raise ConfigurationError where layers are called that would read codes as weights."""
        if self.fp8_gather is not None and not self.fp8_gather.is_computing():
            raise ConfigurationError(
                f"{self.name} is called outside FP8, and its weights were gathered in FP8; drop "
                "--fp8-param-gather"
            )

    def views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The place of each parameter in `full` (1-D, padded_numel, any dtype), in its shape."""
        return FlatBuffer(self.layout, Range(0, self.layout.padded_numel), full).param_views()

    def point_at(self, full: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Make every parameter one of `views`, which are views_of(full); `full` holds the gathered
        parameters."""
        if self.is_unsharded:
            raise IllegalTransition(f"{self.name}: its parameters are gathered already")
        self._full_param = full
        self.guard.reveal()
        self._point_params_at(views)

    def reshard(self) -> None:
        """Drop the full parameters. No-op where they are dropped already or never sharded."""
        if self.is_always_unsharded or not self.is_unsharded:
            return
        self._point_params_at(self.placeholders)
        self._full_param = None
        self.guard.hide()

    @property
    def full_param_storage(self) -> torch.Tensor:
        """1-D tensor of the gathered parameters; raises IllegalTransition where sharded."""
        if self._full_param is None:
            raise IllegalTransition(f"{self.name}: its parameters are not gathered")
        return self._full_param

    def is_gathered_at(self, pointer: int) -> bool:
        """Whether the full parameters are in the storage that starts at address `pointer`."""
        full = self._full_param
        return full is not None and full.untyped_storage().data_ptr() == pointer

    def params_at_rest(self) -> list[torch.Tensor]:
        """Return the tensors that hold the memory of its parameters between two uses."""
        return [self.model_param.storage, *self.placeholders]

    def states(self) -> list[torch.Tensor]:
        """Return the tensors of a trained unit that are at rest beside model_param."""
        if not self.is_trained:
            return []
        own = [self.main_grad.storage, *self.marks.bits.values(), *self.sent_record.states()]
        return own if self.is_main_param_away else [self.main_param.storage, *own]

    # ---- gradients

    @cached_property
    def whole_grads(self) -> list[torch.Tensor]:
        """The place of each parameter's gradient in main_grad, where that is the whole."""
        return self.main_grad.param_views()

    def fuse_grads(self, overwrites: bool) -> None:
        """Let layers put the gradients of their weights where they are collected themselves.

        [Note: fused gradients] Megatron's DDP, and Transformer Engine for it: in backward a layer
        finds the place in `param.main_grad` (point_at_places), adds to it, sets
        `grad_added_to_main_grad` and gives autograd a dummy of undefined values. `overwrites`: it
        writes over what is there, with `overwrite_main_grad`. Layers read that in forward.
        """
        if self.overwrites_main_grads is not overwrites:
            self.overwrites_main_grads = overwrites
            params: list[Any] = self.params
            for param in params:
                param.grad_added_to_main_grad, param.overwrite_main_grad = False, overwrites

    def in_flight(self, slot_nbytes: int) -> UnitInFlight:
        """Size what this unit needs beside its states; slot_nbytes: see ScheduleConfig."""
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
        """Memory that reducing `piece` takes, the piece included."""
        sizes = [axis_group.axis.size for axis_group in self.groups.grad_reduce]
        return reduction_nbytes(piece.numel, sizes, self.groups.grad_dtype.itemsize)

    def reduce_steps(
        self, full: torch.Tensor, shards: Sequence[torch.Tensor], own: torch.Tensor
    ) -> Steps:
        """Reduce-scatter `full`, a piece of the gradients, over the G axes in fp32 and add this
        rank's part to `own`, its part of main_grad.

        shards: memory for it (new_shards). A rank whose parameters got no gradient contributes
        zeros, so that the ranks agree on what is issued.
        """
        last = yield from _reduce_scatter_steps(
            full, self.groups.grad_reduce, shards, self.groups.grad_dtype
        )
        return followed_by(last, lambda: own.add_(shards[-1]))

    def sync_grad_steps(self, scale: float) -> Steps:
        """Once per step: sum the gradients over the axes from G to O and over the replicas.

        Afterwards the O range of main_grad holds the sum over the sharding group times `scale`;
        the rest of main_grad is meaningless until `zero_grads`. The memory between is taken on
        the stream that runs this and is free for it again at the end.
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
        """Undo sync_grad_steps(scale), so that more gradients can be added to their sum: it counts
        as what one replica has collected."""
        own = self.main_grad.view(self.optim_range)
        total = own / scale
        self.main_grad.storage.zero_()
        if self.groups.topology.replica_index == 0:
            own.copy_(total)

    def zero_grads(self) -> None:
        """Forget every gradient of this step."""
        params: list[Any] = self.params
        with self.guard.without_torch_function():
            for param in params:
                param.grad = None
                if self.overwrites_main_grads is not None:
                    param.grad_added_to_main_grad = False
        if self.is_trained:
            self.main_grad.storage.zero_()

    def main_grad_fragments(self) -> list[torch.Tensor]:
        """Return this rank's optimizer shard of each parameter's gradient: 1-D views."""
        return self.main_grad.sub_buffer(self.optim_range).fragment_views()

    def main_param_fragments(self) -> list[torch.Tensor]:
        """Return this rank's optimizer shard of each parameter: 1-D fp32 views."""
        return self.main_param.fragment_views()

    def new_fragments(self) -> "list[Fragment]":
        """Return the fragment of each parameter in this optimizer shard; some are empty."""
        main, is_away = self.main_param, self.is_main_param_away
        return [
            Fragment(index, *main.elements_of(index), grad, is_away)
            for index, grad in enumerate(self.main_grad_fragments())
        ]

    def hold_on_host(self, memory: torch.Tensor) -> None:
        """From now on the optimizer states are on the host, main_param in `memory` (1-D, fp32),
        unless it is a view of model_param. Before `new_fragments`."""
        self.is_on_host = True
        if not self.is_main_param_aliased:
            memory.copy_(self.main_param.storage)
            self.main_param = FlatBuffer(self.layout, self.optim_range, memory)

    @property
    def is_counted(self) -> bool:
        """Whether sums over all ranks take this unit's O range from this rank, and not from another
        replica of it."""
        return self.groups.topology.replica_index == 0

    # ---- after the optimizer

    @torch.no_grad()
    def copy_model_to_main(self) -> None:
        """Derive main_param from model_param (after the model was loaded)."""
        if self.is_trained and not self.is_main_param_aliased:
            self.main_param.storage.copy_(self.model_param.view(self.optim_range))

    def cast_main_param(self, values: torch.Tensor) -> None:
        """Cast `values` of main_param into this rank's O range of the P shard."""
        self.marks.write(values, self.model_param.view(self.optim_range))

    def sync_param_steps(self) -> Steps:
        """Once per step: cast main_param to the model dtype and gather it into the P shard."""
        if not (self.is_main_param_aliased or self.is_cast):
            self.cast_main_param(self.main_param.storage.to(self.device))
        self.is_cast = False
        if self.sent_record.is_watched:
            self.sent_record.note_sent()
        return (yield from self.complete_param_steps())

    def preview_param_steps(self, update: Callable[[torch.Tensor], None]) -> Steps:
        """Gather into the P shard what `update` makes of main_param, which stays as it is.

        update: called with a copy of this rank's main parameters, 1-D fp32.
        """
        if self.is_main_param_aliased:
            return (yield from self._preview_beside_steps(update))
        copy = self.main_param.storage.clone()
        update(copy)
        self.marks.write(copy, self.model_param.view(self.optim_range))
        self.sent_record.note_sent()
        return (yield from self.complete_param_steps())

    def _preview_beside_steps(self, update: Callable[[torch.Tensor], None]) -> Steps:
        """preview_param_steps, where this rank's O range of the P shard is main_param itself: only
        the other ranks' ranges may change. Whoever trains may read and write main_param until the
        update."""
        own = self.optim_range.within(self.model_param.range)
        gathered = torch.empty_like(self.model_param.storage)
        copy = gathered[own.start : own.stop].copy_(self.main_param.storage)
        update(copy)
        self.sent_record.note_sent(copy)
        last = yield from all_gather_steps(copy, gathered, self.groups.param_sync)

        def take_others() -> None:
            for part in (slice(own.start), slice(own.stop, None)):
                self.model_param.storage[part].copy_(gathered[part])

        return followed_by(last, take_others)

    def complete_param_steps(self) -> Steps:
        """Gather the P shard from what the ranks hold of it in their O ranges."""
        own = self.model_param.view(self.optim_range)
        return all_gather_steps(own, self.model_param.storage, self.groups.param_sync)

    def state_nbytes(self) -> dict[str, int]:
        """Bytes this rank holds at rest on the device, by state; an aliased main_param counts as
        zero."""
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
    """Reduce-scatter in fp32; each contribution travels in `dtype`."""
    is_rounded = dtype != torch.float32
    return (rounded_reduce_scatter_steps if is_rounded else reduce_scatter_steps)(
        full, axes, shards
    )
