# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which tensors that autograd saved are views of a unit's gathered parameters."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_asynchzp.zero.unit import HZPUnit, Phase

# Private to torch: its public form is a context manager, and these are set by two hooks.
_saved_tensor_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


@dataclass(frozen=True)
class SavedView:
    """A strided view of a unit's full parameters, without their memory."""

    unit: HZPUnit
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedViews:
    """Saved-tensor hooks around the forward of units (law 5).

    nn.Linear saves `weight.t()`, a view of the full parameters, which are dropped after the
    forward. [Note: saved views] Saved as memory, that view would keep them alive or, where
    memory is reused, read another unit's parameters: a silent wrong gradient. Packed as
    (unit, offset, shape, stride) it costs nothing and unpacks from the parameters gathered for
    backward; `on_missing` gathers them where they are not gathered yet.

    The hooks cost some microseconds for each tensor that is saved. The layers of Megatron and of
    Transformer Engine save the parameter itself, which autograd keeps as the object that it is: it
    reads what was gathered for backward without any hook. So a unit of which a whole step saved
    nothing else goes without them, until a view of it is found when its memory is to be reused
    ([Note: views that outlive the unit]).
    """

    def __init__(self, on_missing: Callable[[HZPUnit], None]):
        self._on_missing = on_missing
        self._units_by_storage: dict[int, HZPUnit] = {}
        self._watched: set[HZPUnit] = set()  # gathered for a forward of this step, under hooks
        self._with_views: set[HZPUnit] = set()
        self._without_views: set[HZPUnit] = set()

    def begin_step(self, viewed: set[HZPUnit]) -> None:
        """A step begins: what the one before has shown of its units holds from now on.

        viewed: units of which a view was found when their memory was to be reused.
        """
        self._with_views |= viewed
        self._without_views = (self._without_views | self._watched) - self._with_views
        self._watched.clear()

    def note_view(self, unit: HZPUnit) -> None:
        """`unit` needs the hooks: a view of its parameters was found."""
        self._with_views.add(unit)

    def are_needed_by(self, units: Iterable[HZPUnit]) -> bool:
        """Whether the forward of `units` is to run under the hooks."""
        return not self._without_views.issuperset(units)

    def track(self, unit: HZPUnit) -> None:
        """Recognise views of `unit`'s gathered parameters from now on."""
        if unit not in self._without_views and not unit.is_always_unsharded:
            pointer = unit.full_param_storage.untyped_storage().data_ptr()
            self._units_by_storage[pointer] = unit
            if torch.is_grad_enabled():
                self._watched.add(unit)

    def push(self) -> None:
        """Let autograd save through this object until the matching `pop`."""
        _saved_tensor_hooks._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def pop(self) -> None:
        """Undo the latest `push`."""
        _saved_tensor_hooks._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor  # a wrapper subclass has no storage of its own to ask
        pointer = tensor.untyped_storage().data_ptr()
        unit = self._units_by_storage.get(pointer)
        if unit is None or not unit.is_gathered_at(pointer):
            # [Note: saved outputs] A node that saves its own output through hooks would hold a
            # tensor that holds the node: a cycle that nothing collects where backward never runs.
            # Autograd puts its own edges on what `_unpack` returns.
            return tensor if tensor.grad_fn is None else tensor.detach()
        if type(tensor) is torch.Tensor:
            self.note_view(unit)
        offset = int(tensor.storage_offset())
        return SavedView(unit, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        if not isinstance(saved, SavedView):
            return saved
        if saved.unit.phase is not Phase.UNSHARDED:
            self.note_view(saved.unit)  # nothing else would gather it in time
        self._on_missing(saved.unit)
        full = saved.unit.full_param_storage
        if saved.dtype != full.dtype:
            full = full.view(saved.dtype)
        return full.as_strided(saved.shape, saved.stride, saved.offset)
