# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which elements of a unit's parameters may have changed since a named moment.

[Note: exact changes] A 16-bit parameter is written where main_param is cast into this rank's O
range, and only there the old and the new value meet. Each difference sets a bit. An element that
changed back, or whose early send was cancelled, keeps its bit, and its final value is right. Code
that writes parameters in other ways says so, and then all of them count as changed.
"""

import torch

from megatron_asynchzp.engine.sharding.topology import Range

_PIECE_NUMEL = 1 << 22  # compared at once, so that it takes little memory
_BITS = 8


class Marks:
    """The marks of a unit, for its O range of `numel` elements (a multiple of 8).

    Untrained parameters never count as changed. With `writes_are_casts` only `write` changes
    parameters. Without it main_param is a view of them, and all count as changed.
    """

    def __init__(self, numel: int, device: torch.device, is_trained: bool, writes_are_casts: bool):
        self._numel, self._device = numel, device
        self._is_trained, self._writes_are_casts = is_trained, writes_are_casts
        # 1-D uint8 [numel / 8] of each mark; element i is bit i % 8 of byte i // 8.
        self.bits: dict[str, torch.Tensor] = {}
        # Marks since which every element may have changed.
        self.rewritten: set[str] = set()
        self.names: set[str] = set()  # of all marks

    def set(self, name: str) -> None:
        self.drop(name)
        self.names.add(name)
        if self._is_trained and self._writes_are_casts:
            self.bits[name] = torch.zeros(
                self._numel // _BITS, dtype=torch.uint8, device=self._device
            )
        elif self._is_trained:
            self.rewritten.add(name)

    def drop(self, name: str) -> None:
        self.names.discard(name)
        self.rewritten.discard(name)
        self.bits.pop(name, None)

    def note_rewritten(self) -> None:
        """Count all elements as changed: code wrote the parameters in another way."""
        self.rewritten |= self.names
        self.bits.clear()

    def may_have_changed(self, name: str) -> bool:
        """Return whether any element may have changed; the same on all ranks."""
        return name in self.bits or name in self.rewritten

    def write(self, values: torch.Tensor, place: torch.Tensor) -> None:
        """Cast `values` (1-D, fp32) into `place`, this rank's O range of the parameters (1-D)."""
        if not self.bits:
            place.copy_(values)
            return
        for start in range(0, self._numel, _PIECE_NUMEL):
            piece = slice(start, start + _PIECE_NUMEL)
            old, new = place[piece], values[piece].to(place.dtype)
            # As integers: 0.0 is not -0.0, and a NaN is itself.
            changed = packed(old.view(torch.int16) != new.view(torch.int16))
            for bits in self.bits.values():
                bits[start // _BITS :][: changed.numel()] |= changed
            old.copy_(new)


def packed(flags: torch.Tensor) -> torch.Tensor:
    """Return 1-D uint8 with flag i in bit i % 8 of byte i // 8; `flags`: 1-D bool, 8n."""
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=flags.device)
    return (flags.view(torch.uint8).view(-1, _BITS) << shifts).sum(-1, dtype=torch.uint8)


def unpacked(bits: torch.Tensor, part: Range, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the flags of `part`, from a multiple of 8 on, as a bool tensor of `shape`."""
    own = bits[part.start // _BITS : -(-part.stop // _BITS)]
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
    return ((own[:, None] >> shifts) & 1).view(-1)[: part.numel].to(torch.bool).view(shape)
