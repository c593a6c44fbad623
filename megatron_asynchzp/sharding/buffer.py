# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one 1-D tensor: a range of a unit's flat layout."""

from collections.abc import Sequence

import torch

from megatron_asynchzp.sharding.layout import FlatLayout
from megatron_asynchzp.sharding.topology import Range


class FlatBuffer:
    """The elements `range` of a flat layout, in one 1-D tensor.

    layout: offsets of the parameters.
    range: what this buffer holds, in flat coordinates.
    storage: a 1-D tensor of `range.numel` elements (owned, or a view of a larger buffer).
    """

    def __init__(self, layout: FlatLayout, range_: Range, storage: torch.Tensor):
        if storage.dim() != 1 or storage.numel() != range_.numel:
            raise ValueError(f"{range_} needs {range_.numel} elements, got {storage.shape}")
        self.layout = layout
        self.range = range_
        self.storage = storage

    @property
    def nbytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()

    def view(self, part: Range) -> torch.Tensor:
        """1-D view of the flat range `part`, which must lie within this buffer."""
        inside = part.within(self.range)
        return self.storage[inside.start : inside.stop]

    def sub_buffer(self, part: Range) -> "FlatBuffer":
        """A buffer over `part` that shares this one's memory."""
        return FlatBuffer(self.layout, part, self.view(part))

    def fragment_views(self) -> list[torch.Tensor]:
        """1-D view of what this buffer holds of each parameter; empty tensors included."""
        pieces = self.layout.fragments(self.range)
        return [self.view(piece) if piece.numel else self.storage[:0] for piece in pieces]

    def held_of(self, index: int) -> tuple[Range, torch.Tensor]:
        """Return the part of parameter number `index` that this buffer holds: which of its
        row-major elements, and a 1-D view of them."""
        piece = self.layout.slices[index].range
        held = piece.intersect(self.range)
        if not held.numel:
            return Range(0, 0), self.storage[:0]
        return held.within(piece), self.view(held)

    def param_views(self) -> list[torch.Tensor]:
        """Each parameter in its own shape; only for a buffer that holds the whole layout."""
        if self.range != Range(0, self.layout.padded_numel):
            raise ValueError("parameter views need the whole flat buffer, this is a shard")
        return [self.view(s.range).view(s.shape) for s in self.layout.slices]

    def copy_params(self, params: Sequence[torch.Tensor]) -> None:
        """Fill from full parameters (cast to this buffer's dtype); padding becomes zero."""
        self.storage.zero_()
        for piece, param in zip(self.layout.slices, params, strict=True):
            part = piece.range.intersect(self.range)
            if part.numel:
                inside = part.within(piece.range)
                self.view(part).copy_(param.detach().reshape(-1)[inside.start : inside.stop])
