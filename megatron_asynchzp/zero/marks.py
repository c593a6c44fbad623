# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which elements of a unit's parameters may have changed since a named moment.

[Note: exact changes] A 16-bit parameter is written where main_param is cast into this rank's O
range, and there alone old and new value lie side by side. What differs is added up as one bit per
element. An element that was changed and changed back has its bit too, as has one that was sent
early and taken back: who takes the values at the end gets them right. Whatever else writes
parameters says so, and all of them count as changed then.
"""

import torch

from megatron_asynchzp.sharding.topology import Range

_PIECE_NUMEL = 1 << 22  # compared at once, so that it takes little memory
_BITS = 8


class Marks:
    """The marks of one unit.

    numel: of its O range, a multiple of 8.
    is_cast: whether its parameters are written by `write` alone. Where they are not (main_param is
        a view of them) all count as changed; where they are not trained none does.

    names: of all marks.
    bits: of each mark, 1-D uint8 [numel / 8]; element i is bit i % 8 of byte i // 8.
    rewritten: marks since which every element may have changed.
    """

    def __init__(self, numel: int, device: torch.device, is_trained: bool, is_cast: bool):
        self._numel, self._device = numel, device
        self._is_trained, self._is_cast = is_trained, is_cast
        self.bits: dict[str, torch.Tensor] = {}
        self.rewritten: set[str] = set()
        self.names: set[str] = set()

    def set(self, name: str) -> None:
        """From now on changes count for `name`; what did before is forgotten."""
        self.drop(name)
        self.names.add(name)
        if self._is_trained and self._is_cast:
            self.bits[name] = torch.zeros(
                self._numel // _BITS, dtype=torch.uint8, device=self._device
            )
        elif self._is_trained:
            self.rewritten.add(name)

    def drop(self, name: str) -> None:
        """Forget `name`, if it is known."""
        self.names.discard(name)
        self.rewritten.discard(name)
        self.bits.pop(name, None)

    def note_rewritten(self) -> None:
        """The parameters were written otherwise."""
        self.rewritten |= self.names
        self.bits.clear()

    def may_have_changed(self, name: str) -> bool:
        """Whether any element may have; the same on all ranks."""
        return name in self.bits or name in self.rewritten

    def write(self, values: torch.Tensor, place: torch.Tensor) -> None:
        """Cast `values` (fp32) into `place`, this rank's O range of the parameters; both 1-D."""
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
    """flags: 1-D bool, a multiple of 8. Returns 1-D uint8, flag i in bit i % 8 of byte i // 8."""
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=flags.device)
    return (flags.view(torch.uint8).view(-1, _BITS) << shifts).sum(-1, dtype=torch.uint8)


def unpacked(bits: torch.Tensor, part: Range, shape: tuple[int, ...]) -> torch.Tensor:
    """The flags `part` of `bits` (see `packed`) as a bool tensor of `shape`; `part` begins at a
    multiple of 8."""
    own = bits[part.start // _BITS : -(-part.stop // _BITS)]
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
    return ((own[:, None] >> shifts) & 1).view(-1)[: part.numel].to(torch.bool).view(shape)
