# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a region of a model's work that runs by hand, and says itself when it begins and ends."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron_asynchzp.engine.zero.unit import HZPUnit


class RegionEngine(Protocol):
    """The engine, as a region sees it."""

    def region_forward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def region_backward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def complete(self, units: list[HZPUnit]) -> None: ...


@dataclass(frozen=True, eq=False)
class ManualRegion:
    """A part of a layer, such as its attention, whose backward is a run of autograd of its own.

        with region.forward(): ...     the parameters are needed | done
        with region.backward(): ...    the parameters are needed | done
        region.complete()              the gradients are complete, late ones too

    Modules within are called as usual. Other regions, of any micro-batch, may run between two of
    these moments, but not within one. See HZPRuntime.manual_region.
    """

    engine: RegionEngine
    units: list[HZPUnit]
    completes: list[HZPUnit]
    recomputed: list[HZPUnit]

    def forward(self) -> AbstractContextManager[None]:
        return self.engine.region_forward(self.units)

    def backward(self) -> AbstractContextManager[None]:
        return self.engine.region_backward(list(dict.fromkeys([*self.units, *self.recomputed])))

    def complete(self) -> None:
        self.engine.complete(self.completes)
