# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the vocabulary of a step: units, visits, phases and actions. order.py makes the
actions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.sharding.backward_room import OuterTraffic
from megatron_asynchzp.sharding.in_flight import UnitInFlight


@dataclass(frozen=True)
class OrderUnit:
    """Properties of a unit on which the order depends.

    size: equal for units of the same size.
    memory: what it needs in flight.
    is_gathered: its parameter shard is a part.
    is_reduced: its gradient shard is.
    reduces_at_end: only the end of backward completes its gradient (units of several modules, and
        those around others).
    sum_nbytes: of its whole gradient in fp32.
    traffic: what it sends outside its parameter shard.
    may_be_early: whether nothing changes its gradient between its reduction and the clipping.
    """

    size: object
    memory: UnitInFlight
    is_gathered: bool = True
    is_reduced: bool = True
    is_trained: bool = True
    reduces_at_end: bool = False
    sum_nbytes: int = 0
    traffic: OuterTraffic = OuterTraffic(0.0, 0.0)
    may_be_early: bool = True


@dataclass(frozen=True)
class Visit:
    """A call of the module that holds the unit `unit`, with those inside it, in their order."""

    unit: int
    inner: tuple["Visit", ...] = ()


class Phase(NamedTuple):
    """Forward or backward of one micro-batch through one model chunk.

    is_last: the micro-batch after which the chunk's gradients are reduced over all ranks.
    """

    is_forward: bool
    chunk: int
    micro_batch: int
    is_last: bool = False


COMPUTE, GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC = range(5)
"""Kinds of actions; the last four are lanes of their own."""


class Action(NamedTuple):
    """The main thread computes with a unit, or submits an operation on it.

    after: earlier actions, by index, that must have ended before this one begins: results that it
        reads, and the last uses of the memory that it writes.
    phase: index of the phase.
    """

    kind: int
    unit: int
    after: tuple[int, ...]
    phase: int


def in_use_order(visits: Sequence[Visit], is_forward: bool) -> Iterator[int]:
    """Units in the order in which forward, or backward, needs their parameters."""
    for visit in visits if is_forward else reversed(visits):
        yield visit.unit
        yield from in_use_order(visit.inner, is_forward)


def in_completion_order(visits: Sequence[Visit]) -> Iterator[int]:
    """Units in the order in which backward completes their gradients."""
    for visit in reversed(visits):
        yield from in_completion_order(visit.inner)
        yield visit.unit
