# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A 1-D tensor that holds a range of a unit's flat layout."""

from collections.abc import Sequence

import torch

from megatron_asynchzp.engine.sharding.layout import FlatLayout
from megatron_asynchzp.engine.sharding.topology import Range


class FlatBuffer:
    """The elements `range` of a flat layout, in one 1-D tensor."""

    def __init__(self, layout: FlatLayout, range_: Range, storage: torch.Tensor):
        if storage.dim() != 1 or storage.numel() != range_.numel:
            raise ValueError(f"{range_} needs {range_.numel} elements, got {storage.shape}")
        self.layout = layout
        self.range = range_  # flat coordinates
        self.storage = storage  # 1-D, `range.numel` elements; may be a view of a larger buffer

    @property
    def nbytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()

    def view(self, part: Range) -> torch.Tensor:
        """Return a 1-D view of the flat range `part`, which must lie within this buffer."""
        inside = part.within(self.range)
        return self.storage[inside.start : inside.stop]

    def sub_buffer(self, part: Range) -> "FlatBuffer":
        return FlatBuffer(self.layout, part, self.view(part))

    def fragment_views(self) -> list[torch.Tensor]:
        """Return a 1-D view of each parameter's elements in this buffer; some may be empty."""
        pieces = self.layout.fragments(self.range)
        return [self.view(piece) if piece.numel else self.storage[:0] for piece in pieces]

    def elements_of(self, index: int) -> tuple[Range, torch.Tensor]:
        """Return which elements of parameter number `index` are here, and a 1-D view of them."""
        piece = self.layout.slices[index].range
        common = piece.intersect(self.range)
        if not common.numel:
            return Range(0, 0), self.storage[:0]
        return common.within(piece), self.view(common)

    def param_views(self) -> list[torch.Tensor]:
        if self.range != Range(0, self.layout.padded_numel):
            raise ValueError("parameter views need the whole flat buffer, this is a shard")
        return [self.view(s.range).view(s.shape) for s in self.layout.slices]

    def copy_params(self, params: Sequence[torch.Tensor]) -> None:
        """Copy full parameters into this buffer, cast to its dtype, and zero the padding."""
        self.storage.zero_()
        for piece, param in zip(self.layout.slices, params, strict=True):
            part = piece.range.intersect(self.range)
            if part.numel:
                inside = part.within(piece.range)
                self.view(part).copy_(param.detach().reshape(-1)[inside.start : inside.stop])
