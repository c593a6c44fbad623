# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one part of a model's work that is run by hand: it says itself when it begins and is done,
which for a call of a module the hooks of calls.py find out.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron_asynchzp.zero.unit import HZPUnit


class Engine(Protocol):
    """The engine, as it hears of parts."""

    def part_forward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def part_backward(self, units: list[HZPUnit]) -> AbstractContextManager[None]: ...
    def complete(self, units: list[HZPUnit]) -> None: ...


@dataclass(frozen=True, eq=False)
class Part:
    """Attention, say, or the experts of a layer, whose backward is a run of autograd of its own.

        with part.forward(): ...     the parameters are needed | done
        with part.backward(): ...    the parameters are needed | done
        part.complete()              the gradients are complete, those that come late too

    Modules within are called as ever. Between two of these moments other parts may run, of the same
    micro-batch or of another one, but within none of them. The units: see HZPRuntime.part.
    """

    engine: Engine
    units: list[HZPUnit]
    completes: list[HZPUnit]
    recomputed: list[HZPUnit]

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward."""
        return self.engine.part_forward(self.units)

    def backward(self) -> AbstractContextManager[None]:
        """Around the backward: one run of autograd that begins at what the forward made."""
        return self.engine.part_backward(list(dict.fromkeys([*self.units, *self.recomputed])))

    def complete(self) -> None:
        """After the backward, and whatever adds to the gradients later."""
        self.engine.complete(self.completes)
