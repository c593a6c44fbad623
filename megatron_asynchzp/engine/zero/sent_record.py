# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records what this rank sent of a unit's parameters, and finds other code's writes."""

import weakref
from operator import ne
from typing import Protocol

import torch

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.sharding.layout import FlatLayout
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.sharding.value_hash import fingerprint
from megatron_asynchzp.engine.zero.guard import ParamGuard


class RecordedUnit(Protocol):
    """The parts of an HZPUnit that its record reads."""

    params: list[torch.nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    is_trained: bool
    layout: FlatLayout
    groups: ShardGroups
    optim_range: Range
    model_param: FlatBuffer
    main_param: FlatBuffer
    guard: ParamGuard
    placeholders: list[torch.Tensor]
    nan: torch.Tensor
    is_always_unsharded: bool

    @property
    def is_unsharded(self) -> bool: ...
    @property
    def is_main_param_aliased(self) -> bool: ...
    @property
    def full_param_storage(self) -> torch.Tensor: ...


class SentRecord:
    """Fingerprints and versions of a unit's parameters at the moments when the engine wrote them.

    main thread   | update: note_update, note_expected |         | use: was_written?
    lane          |                                    | note_sent, all-gather |
    """

    def __init__(self, unit: RecordedUnit):
        self._unit: RecordedUnit = weakref.proxy(unit)
        # Whether every send is noted, and not only those before an update.
        self.is_watched = False
        # torch's version counters at the last update; a different value means that other code
        # wrote to the parameter.
        self.versions = [param._version for param in unit.params]
        if unit.is_trained:
            # 0-dim int64, in memory that stays: the stream of a lane writes it, others read it.
            self._sent_fingerprint = torch.zeros((), dtype=torch.int64, device=unit.device)
            self._expected_fingerprint = self._sent_fingerprint.clone()

    def states(self) -> list[torch.Tensor]:
        return [self._sent_fingerprint, self._expected_fingerprint]

    # ---- what the engine notes

    def note_sent(self, values: torch.Tensor | None = None) -> None:
        """Note that the other ranks get `values` (1-D), by default the O range of the P shard."""
        unit = self._unit
        if values is None:
            values = unit.model_param.view(unit.optim_range)
        self._sent_fingerprint.copy_(fingerprint(values))

    def note_expected(self, is_as_sent: bool = False) -> None:
        """Note that other ranks should have main_param's content; `is_as_sent`: as last sent."""
        self._expected_fingerprint.copy_(
            self._sent_fingerprint if is_as_sent else self._fingerprint_now()
        )

    def note_update(self) -> None:
        """Count the update as a write of the parameters, so that no backward reads older values."""
        unit = self._unit
        torch.autograd.graph.increment_version(unit.params)
        with unit.guard.without_torch_function():
            self.versions = [param._version for param in unit.params]

    # ---- what other code wrote

    def differs_from_sent(self) -> torch.Tensor:
        """Return a 0-dim bool: whether sending main_param now would send other values."""
        return self._fingerprint_now() != self._sent_fingerprint

    def was_written(self) -> torch.Tensor | bool:
        """Return whether other code wrote to main_param, or to always gathered parameters.

        A write that was undone after the lane had sent it counts too.
        """
        if self._unit.is_always_unsharded and self._are_versions_changed():
            return True
        expected = self._expected_fingerprint
        return (self._fingerprint_now() != expected).logical_or_(self._sent_fingerprint != expected)

    def was_written_in_use(self) -> torch.Tensor | bool:
        """Return whether other code replaced the data of gathered parameters, or wrote to it."""
        unit = self._unit
        full, own = unit.full_param_storage, unit.optim_range
        start, itemsize = full.data_ptr(), full.element_size()
        for param, piece in zip(unit.params, unit.layout.slices, strict=True):
            if param.numel() and param.data_ptr() != start + itemsize * piece.range.start:
                return True
        if self._are_versions_changed():
            return True
        if unit.groups.topology.world_size == 1 and unit.is_main_param_aliased:
            return False  # the optimizer trains these very values, and no other rank has a copy
        shard = unit.model_param.view(own)
        sent = self._sent_fingerprint if unit.is_trained else fingerprint(shard)
        return fingerprint(full[own.start : own.stop]) != sent

    def was_replaced_at_rest(self, with_content: bool) -> bool:
        """Return whether other code set the data of idle parameters; with_content: or filled it."""
        unit = self._unit
        if unit.is_unsharded and not unit.is_always_unsharded:
            return False
        for param, piece, nan in zip(
            unit.params, unit.layout.slices, unit.placeholders, strict=True
        ):
            place = nan.data_ptr()
            if unit.is_always_unsharded:
                full = unit.full_param_storage
                place = full.data_ptr() + unit.dtype.itemsize * piece.range.start
            if param.numel() and param.data_ptr() != place:
                return True
        return with_content and not unit.nan.isnan().item()

    def _fingerprint_now(self) -> torch.Tensor:
        unit = self._unit
        dtype = None if unit.is_main_param_aliased else unit.dtype
        return fingerprint(unit.main_param.storage, dtype)

    def _are_versions_changed(self) -> bool:
        with self._unit.guard.without_torch_function():
            now = (param._version for param in self._unit.params)
            return any(map(ne, now, self.versions))
