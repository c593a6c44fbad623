# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns law 5: what autograd saves of gathered parameters is saved as a place in the unit, not as
memory, and becomes a view of wherever the unit is gathered when backward needs it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_asynchzp.zero.unit import HZPUnit


@dataclass(frozen=True)
class SavedView:
    """A strided view of a unit's full parameters, without their memory."""

    unit: HZPUnit
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedViews:
    """Saved-tensor hooks around the forward of units.

    nn.Linear saves `weight.t()`, a view of the full parameters, which are dropped after the
    forward. [Note: saved views] Saved as memory, that view would keep them alive or, where
    memory is reused, read another unit's parameters: a wrong gradient without a word. Packed as
    (unit, offset, shape, stride) it costs nothing and unpacks from the parameters gathered for
    backward; `on_missing` gathers them where nobody did yet.
    """

    def __init__(self, on_missing: Callable[[HZPUnit], None]):
        self._on_missing = on_missing
        self._units_by_storage: dict[int, HZPUnit] = {}

    def track(self, unit: HZPUnit) -> None:
        """Recognise views of `unit`'s gathered parameters from now on."""
        if not unit.is_always_unsharded:
            pointer = unit.full_param_storage.untyped_storage().data_ptr()
            self._units_by_storage[pointer] = unit

    def push(self) -> None:
        """Let autograd save through this object until the matching `pop`."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def pop(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor  # a wrapper subclass has no storage of its own to ask
        pointer = tensor.untyped_storage().data_ptr()
        unit = self._units_by_storage.get(pointer)
        if unit is None or not unit.is_gathered_at(pointer):
            return tensor
        return SavedView(unit, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        if not isinstance(saved, SavedView):
            return saved
        self._on_missing(saved.unit)
        full = saved.unit.full_param_storage
        if saved.dtype != full.dtype:
            full = full.view(saved.dtype)
        return full.as_strided(saved.shape, saved.stride, saved.offset)
